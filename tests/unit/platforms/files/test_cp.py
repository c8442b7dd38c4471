"""`lockstep cp` as it is typed, and its way through connections that break: the pod's end is a process of this machine here."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from golden.plan_cases import cluster as profile
from golden.plan_cases import job
from golden.plan_cases import profile as a_profile
from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.main import main
from lockstep.kube.exec import PodPlace
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import MADE_BY_OPERATOR, PlatformDefaults
from lockstep.platforms.files import transfer
from lockstep.platforms.files.copies import Copy, Remote, read, read_all, tell_result
from lockstep.platforms.files.meter import Meter
from lockstep.platforms.files.transfer import Carried, TransferProgress, get, put, refuse_outside
from lockstep.platforms.hosts.fleet import old_source_of
from lockstep.platforms.inpod import carry
from lockstep.platforms.kubernetes import files as cp_module
from lockstep.platforms.kubernetes.files import _copy_before_start
from lockstep.platforms.kubernetes.job import known_job
from lockstep.programs import Broken, ProgramFailed
from support.fake_cluster import FakeCluster
from support.in_process import lockstep

PLACE = PodPlace(FakeCluster().as_cluster, "ns", "x-0", "trainer")
CHUNKS = bytes(range(256)) * 4096 * 6


class LocalProgram:
    """What `PodPlace.program` gives, over a process. The connection breaks after `lasts` bytes in either direction."""

    def __init__(self, process: asyncio.subprocess.Process, lasts: int) -> None:
        self.process, self.left = process, lasts
        self.code: int | None = None

    def _count(self, data: bytes) -> None:
        self.left -= len(data)
        if self.left < 0:
            self.process.kill()
            raise Broken("the connection broke")

    async def write(self, data: bytes) -> None:
        self._count(data)
        try:
            self.process.stdin.write(data)
            await self.process.stdin.drain()
        except ConnectionError as error:
            raise Broken(str(error)) from error

    async def read(self) -> bytes:
        data = await self.process.stdout.read(1 << 16)
        self._count(data)
        if not data:
            self.code = await self.process.wait()
        return data

    def failure(self) -> ProgramFailed:
        return ProgramFailed(f"pod x-0: ended with {self.code}")


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each connection lasts for, in turn; then for ever. What was used is taken out."""
    lasting: list[int] = []

    @asynccontextmanager
    async def local(place: PodPlace, command: Sequence[str], **options: Any) -> AsyncIterator[LocalProgram]:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(sys.executable, *command[1:], **pipes)
        try:
            yield LocalProgram(process, lasting.pop(0) if lasting else 1 << 60)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    monkeypatch.setattr(PodPlace, "program", local)
    monkeypatch.setattr(transfer, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(transfer, "LONGEST_PAUSE_SECONDS", 0.0)
    return lasting


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "volume").mkdir()
    (tmp_path / "model/weights").write_bytes(CHUNKS)
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path / "model"


def up(model: Path, volume: Path, progress: TransferProgress | None = None, to: str = "/") -> Carried:
    return asyncio.run(put(PLACE, model, f"{volume}{to}", [str(volume)], progress or TransferProgress()))


def test_a_connection_that_breaks_twice_costs_only_what_was_on_the_way(connections: list[int], model: Path, tmp_path: Path) -> None:
    connections += [len(CHUNKS) // 2, len(CHUNKS) // 2]
    progress = TransferProgress()
    assert up(model, tmp_path / "volume", progress).resumed == 1
    assert (tmp_path / "volume/model/weights").read_bytes() == CHUNKS
    assert connections == [] and progress.passed < 2 * len(CHUNKS)


def test_what_comes_back_is_what_went_there(connections: list[int], model: Path, tmp_path: Path) -> None:
    up(model, tmp_path / "volume")
    connections += [len(CHUNKS) // 2]
    roots = [str(tmp_path / "volume")]
    progress = TransferProgress()
    asyncio.run(get(PLACE, f"{tmp_path}/volume/model", f"{tmp_path}/back", roots, progress))
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == {"weights": CHUNKS, "config.json": b"{}"}


def test_a_pod_has_no_say_in_what_a_file_is_called(connections: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made the image decides what its python3 says."""
    entry = {"name": "", "size": 2, "mode": 0o4777}
    lines = [{"name": "../../.bashrc", "entries": [entry]}, {"plan": [[0, 0]]}]
    sent = b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b"\0\0\0\2x\n\0\0\0\0"
    sent += json.dumps({"sha256": hashlib.sha256(b"x\n").hexdigest()}).encode() + b"\n"
    liar = f"import sys; sys.stdout.buffer.write({sent!r}); sys.stdout.flush(); sys.stdin.read()".encode()
    monkeypatch.setattr(transfer, "source_of", lambda program: liar)
    (tmp_path / "here/demo").mkdir(parents=True)
    asyncio.run(get(PLACE, "/workspace/runs/log.jsonl", f"{tmp_path}/here/demo/", ["/workspace"], TransferProgress()))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == ["here/demo/log.jsonl"]
    assert (tmp_path / "here/demo/log.jsonl").stat().st_mode & 0o7022 == 0


def test_a_connection_that_gets_nowhere_is_given_up_with_what_to_do(connections: list[int], model: Path, tmp_path: Path) -> None:
    connections += [10_000] * 6
    with pytest.raises(Failed, match="run the same command again to continue"):
        up(model, tmp_path / "volume")


def test_what_the_pod_refuses_is_told_in_its_words_and_not_tried_again(connections: list[int], model: Path, tmp_path: Path) -> None:
    with pytest.raises(Failed, match="elsewhere is outside of the job's volumes"):
        up(model, tmp_path / "volume", to="/../elsewhere")


def test_an_interrupt_ends_the_thread_and_the_program(connections: list[int], model: Path, tmp_path: Path) -> None:
    async def interrupted() -> None:
        under_way = asyncio.Event()
        loop = asyncio.get_running_loop()
        progress = TransferProgress(lambda: loop.call_soon_threadsafe(under_way.set) and None)
        task = asyncio.ensure_future(put(PLACE, model, f"{tmp_path}/volume/", [str(tmp_path / "volume")], progress))
        await under_way.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert not (tmp_path / "volume/model/weights").exists()
    up(model, tmp_path / "volume")
    assert (tmp_path / "volume/model/weights").read_bytes() == CHUNKS


def test_one_side_is_a_job_and_the_other_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch()
    assert read("a", "x:/datasets/") == Copy("a", Remote("x", "/datasets/"), up=True)
    assert read("x:runs/x/adapter", "out") == Copy("out", Remote("x", "/workspace/runs/x/adapter"), up=False)


def test_what_is_in_a_folder_and_several_files_go_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "src/b.py", "src/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    copies = read_all(["a.py", "src/."], "x:/workspace/")
    assert [(copy.local, copy.remote.path) for copy in copies] == [(name, "/workspace/") for name in ("a.py", "src/b.py", "src/c.py")]
    assert [copy.local for copy in read_all(["."], "x:/workspace/")] == ["a.py", "src"]
    for sources in (["a.py", "src"], ["src/."]):
        with pytest.raises(ConfigError, match="several files go into a folder, whose name must end with /"):
            read_all(sources, "x:/workspace")


def test_files_go_to_the_shared_volumes_of_a_job_that_has_never_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starts(item: dict[str, Any]) -> None:
        item["status"] = {"phase": "Running", "containerStatuses": [{"name": "x", "state": {"running": {}}}]}

    async def carried(copy: Copy, place: Any, progress: Any, sender: Any) -> Carried:
        claims = {volume["persistentVolumeClaim"]["claimName"] for volume in api.objects["Pod", place.pod]["spec"]["volumes"]
                  if "persistentVolumeClaim" in volume}  # fmt: skip
        assert claims <= set(api.names("PersistentVolumeClaim")), "they were made"
        return Carried(1, 1, 5, 0)

    api = FakeCluster(on_create=starts)
    monkeypatch.setattr(cp_module, "_carried", carried)
    copy = Copy("a.py", Remote("x", "/workspace/"), up=True)
    assert asyncio.run(_copy_before_start(api.as_cluster, copy, resolve(job(storage={"mode": "Shared"}), profile("barcelona"))))
    assert api.names("Pod") == [] and api.names("Job") == []


def test_files_go_to_volumes_of_their_own_before_the_first_start_on_nodes_where_the_job_s_pods_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where volumes bind late, the pod that mounts one first chooses the node for it: one with room for what the job's pod asks for, and no
    two on one.
    """

    def starts(item: dict[str, Any]) -> None:
        item["status"] = {"phase": "Running", "containerStatuses": [{"name": "x", "state": {"running": {}}}]}

    async def carried(copy: Copy, place: Any, progress: Any, sender: Any) -> Carried:
        spec = api.objects["Pod", place.pod]["spec"]
        (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"]["matchLabels"] == {"lockstep.dev/reader-of": "x"}
        assert spec["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == "4"
        mounted.update(volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume)
        return Carried(1, 1, 5, 0)

    mounted: set[str] = set()
    api = FakeCluster(on_create=starts)
    monkeypatch.setattr(cp_module, "_carried", carried)
    wanted = resolve(job(nodes=2, storage={"mode": "PerPod"}), profile("barcelona"))
    assert asyncio.run(_copy_before_start(api.as_cluster, Copy("a.py", Remote("x", "/workspace/"), up=True), wanted))
    own = {f"{volume}-x-{node}" for volume in ("workspace", "datasets") for node in (0, 1)}
    assert own <= mounted and own <= set(api.names("PersistentVolumeClaim"))


@pytest.mark.parametrize("image", ["r.example.com/lockstep-operator:1", "r.example.com/mine:1"])
def test_a_job_without_an_image_gets_the_operator_s_before_its_first_start_too(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def starts(item: dict[str, Any]) -> None:
        item["status"] = {"phase": "Running", "containerStatuses": [{"name": "x", "state": {"running": {}}}]}

    async def carried(copy: Copy, place: Any, progress: Any, sender: Any) -> Carried:
        used.append(api.objects["Pod", place.pod]["spec"]["containers"][0]["image"])
        return Carried(1, 1, 5, 0)

    used: list[str] = []
    api = FakeCluster(on_create=starts)
    container = {"image": image}
    api.objects["Deployment", "lockstep-operator"] = {"spec": {"template": {"spec": {"containers": [container]}}}, "metadata": {}}
    monkeypatch.setattr(cp_module, "_carried", carried)
    bare = a_profile(image=None, storage={"mode": "Shared"})
    wanted = resolve(job(gpusPerNode=0), bare, PlatformDefaults(image=MADE_BY_OPERATOR))
    copying = _copy_before_start(api.as_cluster, Copy("a.py", Remote("x", "/workspace/"), up=True), wanted)
    if image.endswith("mine:1"):
        with pytest.raises(ConfigError, match=r"neither the job nor the cluster .* sets an image"):
            asyncio.run(copying)
        assert api.names("Pod") == [] and api.names("PersistentVolumeClaim") == []
    else:
        assert asyncio.run(copying) and used == ["r.example.com/lockstep-trainer:1"]


def test_files_of_another_job_than_the_file_s_are_refused(tmp_path: Path) -> None:
    spec = {"cluster": "barcelona", "script": {"path": "a.py"}}
    whole = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(json.dumps(whole))
    (tmp_path / "a.py").touch()
    refused = lockstep("cp", "-f", str(tmp_path / "job.yaml"), str(tmp_path / "a.py"), "y:/workspace/")
    assert (refused.returncode, "is job x, and not y" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("sent", "files", "said"),
    [
        (1, 1, "x node 0: 1 of 1 file copied (5 B), to /workspace/a.py"),
        (0, 1, "x node 0: 1 file was there already, at /workspace/a.py"),
        (0, 2, "x node 0: 2 files were there already, at /workspace/a.py"),
    ],
)
def test_it_says_how_many_and_where(sent: int, files: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tell_result(Copy("a.py", Remote("x", "/workspace/"), up=True), "x node 0", Carried(files, sent, 5, 0))
    assert capsys.readouterr().out == f"{said}\n"


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [("a", "b", "must be JOB:/path"), ("x:/a", "y:/b", "must be JOB:/path"), ("gone", "x:/a", "gone does not exist")],
)
def test_what_is_no_copy_is_refused(
    source: str, target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lockstep", "cp", source, target])
    assert main() == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/etc/passwd", "/workspace/../etc", "/workspaces", "/"])
def test_a_path_on_no_volume_is_refused_with_those_there_are(path: str) -> None:
    with pytest.raises(ConfigError, match="choose a path below /datasets, /workspace"):
        refuse_outside(path, ["/workspace", "/datasets"])


def test_a_wrong_name_is_told_with_the_jobs_there_are() -> None:
    cluster = FakeCluster({"kind": "TrainingJob", "metadata": {"name": "demo"}}).as_cluster
    with pytest.raises(ConfigError, match="there is no TrainingJob dmo in namespace ns: it has demo; did you mean demo"):
        asyncio.run(known_job(cluster, "ns", "dmo"))


def test_without_a_cluster_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr("sys.argv", ["lockstep", "cp", "x:/workspace/a", str(tmp_path / "b")])
    assert main() == 2
    assert "no cluster can be reached" in capsys.readouterr().err


def test_how_far_it_is_is_told_in_the_units_of_disks() -> None:
    meter = Meter()
    meter.transfers = {
        "node 0": TransferProgress(expected=2_000_000_000, passed=1_000_000_000),
        "node 1": TransferProgress(expected=2_000_000_000, passed=500_000_000),
    }
    assert meter.line(5) == "node 0 50%  node 1 25%  of 2.0 GB, 100.0 MB/s, 15s left"


@pytest.mark.parametrize(("own", "mode"), [(True, 0o600), (False, 0o664)])
def test_what_is_copied_is_the_group_s_in_pods_and_as_the_umask_says_on_a_host(
    model: Path, tmp_path: Path, connections: list[int], own: bool, mode: int
) -> None:
    (model / "weights").chmod(0o664)
    previous, program = os.umask(0o077), old_source_of(carry)
    try:
        asyncio.run(
            put(PLACE, model, f"{tmp_path}/volume/", [str(tmp_path / "volume")], TransferProgress(), on_host=program if own else None)
        )
    finally:
        os.umask(previous)
    assert (tmp_path / "volume/model/weights").stat().st_mode & 0o777 == mode
