"""`lockstep sync` and what it keeps open: one program a pod for all that is sent, and a new one where that ended. The pods are processes
here.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.errors import ConfigError
from lockstep.kube.exec import PodPlace
from lockstep.platforms.files import sending as sending_module
from lockstep.platforms.files import sync as module
from lockstep.platforms.files.sync import Receivers, Synced, sender_of
from lockstep.platforms.kubernetes import files as verb
from lockstep.programs import Broken, NotStarted, ProgramFailed
from support.fake_cluster import FakeCluster


class LocalProgram:
    """What `PodPlace.program` gives, over a process."""

    code = None

    def __init__(self, place: PodPlace, process: asyncio.subprocess.Process) -> None:
        self.place, self.process = place, process

    async def write(self, data: bytes) -> None:
        try:
            self.process.stdin.write(data)
            await self.process.stdin.drain()
        except ConnectionError as error:
            raise Broken("the connection broke") from error

    async def read(self) -> bytes:
        return await self.process.stdout.read(1 << 16)

    def failure(self) -> ProgramFailed:
        return Broken(f"the connection to pod {self.place.pod} broke")


class Pods:
    """The programs that were started, and how often one is refused first."""

    def __init__(self) -> None:
        self.started: list[LocalProgram] = []
        self.refusals = 0

    @asynccontextmanager
    async def program(self, place: PodPlace, command: Sequence[str], **options: Any) -> AsyncIterator[LocalProgram]:
        if self.refusals:
            self.refusals -= 1
            raise NotStarted(f"pod {place.pod} no longer exists in namespace ns")
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(sys.executable, *command[1:], **pipes)
        self.started.append(LocalProgram(place, process))
        try:
            yield self.started[-1]
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Pods:
    found = Pods()
    monkeypatch.setattr(PodPlace, "program", lambda place, command, **options: found.program(place, command, **options))  # noqa: PLW0108 (a method: it gets the place)
    monkeypatch.setattr(sending_module, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(sending_module, "AGAIN_SECONDS", 0.01)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.py").write_text("1")
    return tmp_path / "here"


def cluster() -> FakeCluster:
    status = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
    spec = {"volumes": [{"persistentVolumeClaim": {"claimName": "shared"}}]}
    return FakeCluster({"kind": "Pod", "metadata": {"name": "x-0", "labels": {"lockstep.dev/job": "x"}}, "spec": spec, "status": status})


def watching(folder: Path, there: Path, act: Callable[[], None]) -> None:
    """What `lockstep sync x --watch` does, while `act` goes on."""

    async def both() -> None:
        pods = cluster().as_cluster

        async def send() -> list[Synced]:
            return await receivers.send(await verb._places(pods, "ns", "x"), folder, {"x-0": str(there)}, force=False)

        sending = sending_module.Sending("x", folder, str(there), "-n ns", watch=True)
        async with Receivers() as receivers:
            task = asyncio.create_task(sending_module.send_all(sending, receivers, send, lambda: verb._is_over(pods, "ns", "x")))
            acting = asyncio.ensure_future(asyncio.to_thread(act))
            await asyncio.wait([task, acting], return_when=asyncio.FIRST_COMPLETED, timeout=60)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await acting

    asyncio.run(both())


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def reads(path: Path, text: str) -> None:
    until(lambda: path.exists() and path.read_text() == text)


def test_changes_travel_by_the_program_that_is_there(pods: Pods, folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"

    def act() -> None:
        reads(there / "a.py", "1")
        (folder / "a.py").write_text("two")
        reads(there / "a.py", "two")
        (folder / "b.py").write_text("new")
        reads(there / "b.py", "new")

    watching(folder, there, act)
    assert len(pods.started) == 1


def test_a_pod_that_was_restarted_with_an_empty_volume_gets_everything_again(pods: Pods, folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"

    def act() -> None:
        reads(there / "a.py", "1")
        until((there / ".lockstep/sync.json").exists)  # written last
        for path in sorted(there.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        pods.started[0].process.kill()
        reads(there / "a.py", "1")

    watching(folder, there, act)
    assert len(pods.started) == 2


def test_a_pod_that_can_not_be_reached_is_tried_again_and_told_once(
    pods: Pods, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pods.refusals = 5
    watching(folder, tmp_path / "there", lambda: reads(tmp_path / "there" / "a.py", "1"))
    assert pods.refusals == 0
    assert capsys.readouterr().out.count("x-0: not sent: pod x-0 no longer exists in namespace ns") == 1


def test_a_folder_that_is_replaced_meanwhile_does_not_end_the_watch(
    pods: Pods, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"

    def act() -> None:
        reads(there / "a.py", "1")
        folder.rename(tmp_path / "away")
        until(lambda: "is not a folder" in capsys.readouterr().err)
        (tmp_path / "away" / "a.py").write_text("back")
        (tmp_path / "away").rename(folder)
        reads(there / "a.py", "back")

    watching(folder, there, act)


def test_what_is_sent_once_ends_its_programs_and_a_folder_that_is_none_is_an_error(pods: Pods, folder: Path, tmp_path: Path) -> None:
    async def once(source: Path) -> list[Synced]:
        async with Receivers() as receivers:
            return await receivers.send(
                {"x-0": PodPlace(cluster().as_cluster, "ns", "x-0", "trainer")}, source, {"x-0": str(tmp_path / "there")}
            )

    assert asyncio.run(once(folder))[0].sent == 1
    with pytest.raises(ConfigError, match="is not a folder"):
        asyncio.run(once(tmp_path / "nothing"))
    assert all(program.process.returncode is not None for program in pods.started)


def test_a_pod_whose_program_says_nothing_is_given_up_and_its_program_ended(
    pods: Pods, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "source_of", lambda program: b"import time; time.sleep(1000)")
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.2)

    async def once() -> list[Synced]:
        async with Receivers() as receivers:
            return await asyncio.wait_for(
                receivers.send({"x-0": PodPlace(cluster().as_cluster, "ns", "x-0", "trainer")}, folder, {"x-0": str(tmp_path / "there")}),
                60,
            )

    assert asyncio.run(once())[0].problem == "nothing heard for 0 s"
    assert pods.started[0].process.returncode is not None


def test_what_is_no_answer_is_that_pod_s_problem(pods: Pods, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "source_of", lambda program: b"print('Welcome!', flush=True); input()")

    async def once() -> list[Synced]:
        async with Receivers() as receivers:
            return await receivers.send(
                {"x-0": PodPlace(cluster().as_cluster, "ns", "x-0", "trainer")}, folder, {"x-0": str(tmp_path / "there")}
            )

    assert asyncio.run(once())[0].problem == (
        "the other end does not follow the protocol of copies: it says b'Welcome!'; check the python3 of the pod's image"
    )


async def test_no_node_is_sent_anything_where_one_has_a_file_of_another_folder(
    pods: Pods, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.py").write_text("another")
    places = {name: PodPlace(cluster().as_cluster, "ns", name, "trainer") for name in ("x-0", "x-1")}
    targets = {name: str(tmp_path / name) for name in places}
    sending = sending_module.Sending("x", other, "/workspace", "-n ns")
    with pytest.raises(ConfigError) as refusal:
        async with Receivers() as receivers:
            await receivers.send({"x-1": places["x-1"]}, folder, targets)
            await sending_module.send_once(receivers, places, targets, sending)
    text = str(refusal.value)
    assert text.startswith(f"nothing was sent: a.py in /workspace was sent from {sender_of(folder)}, and would be another file")
    assert (
        f"lockstep sync x {other} --to /workspace/other -n ns, and in the job script.folder: /workspace/other" in text and "--force" in text
    )
    assert not (tmp_path / "x-0").exists() and (tmp_path / "x-1/a.py").read_text() == "1"


def test_what_stays_here_is_said_once_with_its_rule(pods: Pods, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("w1.bin", "w2.bin", "w3.bin", "w4.bin", "x.pyc"):
        (folder / name).write_bytes(bytes(1_000_000))
    (folder / ".gitignore").write_text("*.bin\n")
    there = tmp_path / "there"

    def act() -> None:
        reads(there / "a.py", "1")
        (folder / "a.py").write_text("two")
        reads(there / "a.py", "two")

    watching(folder, there, act)
    line = "left out by .gitignore: 4 files, 4.0 MB (w1.bin, w2.bin, w3.bin, …); an empty .lockstepignore sends them\n"
    assert capsys.readouterr().out.count(line) == 1
    (folder / ".lockstepignore").write_text("w1.bin\n")
    assert module.left_out(folder) == "left out by .lockstepignore: 1 file, 1.0 MB (w1.bin)"
    assert "w1.bin" not in module.scan(folder)
