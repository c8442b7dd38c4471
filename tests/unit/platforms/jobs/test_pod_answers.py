"""What programs in pods answer, when whoever made the image wants to do harm: a sentence, little memory, and never a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import programs
from lockstep.api.errors import ConfigError, Failed
from lockstep.kube.cluster import _lines
from lockstep.kube.exec import PodPlace, ending_of
from lockstep.kube.kinds import path_of
from lockstep.plan.cluster.calibration import point_in
from lockstep.plan.discovery.probe import read_probe
from lockstep.plan.observed import Observed
from lockstep.plan.pages.answers import read_node, read_steps
from lockstep.plan.pages.logs import RankFailures, error_lines
from lockstep.plan.pages.top import snapshot, top_page
from lockstep.plan.render.run import result_in
from lockstep.platforms.files.sending import _lines as _sync_lines
from lockstep.platforms.files.sync import Synced
from lockstep.platforms.jobs import bundle
from lockstep.platforms.jobs.editor import _hear
from lockstep.platforms.jobs.runs import frozen_run
from lockstep.programs import STDOUT, Program, ProgramFailed, answer_of, lines_in
from lockstep_gang.contract.preflight import PREFLIGHT_RESULT, PROBED, SWEEP_POINT
from support.fake_cluster import FakeCluster

NAMES_MAX = 50
LOG_LINE_BYTES_MAX = 1 << 18
LINE_BYTES_MAX = 4 << 20

NAMES = st.sampled_from(
    ["gigabits", "memory", "gpus", "curve", "ranks", "bytes", "limitBytes", "index", "percentage", "cpu", "cores", "limitCores",
        "rankLoads", "rank", "gpu", "gpuProblem", "uuid", "celsius", "loss", "1", "-1", "1e9", "9" * 40, "x"]
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400), st.just(-1)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=6)),
    max_leaves=12,
)
ANSWERS = st.dictionaries(NAMES, VALUES, max_size=8)
JOB: dict[str, Any] = {"metadata": {"name": "x", "namespace": "n"}, "spec": {"nodes": 1}, "status": {"ranks": {"desired": 1, "ready": 1}}}
POD = {"metadata": {"name": "x-0"}, "spec": {"nodeName": "a"}}
NONSENSE = [b"", b"[]", b"1", b"null", b'"x"', b"{", b"[" * 100_000, b"\xff\xfe", b"Welcome!", b"9" * 10_000]


@settings(max_examples=100)
@given(ANSWERS)
def test_whatever_a_node_says_of_itself_top_shows_a_page(answer: dict[str, Any]) -> None:
    assert list(top_page(snapshot(JOB, [POD], {0: read_node(answer)}), 0.0))


def test_what_a_node_truly_says_stays_as_it_is() -> None:
    answer = {"gigabits": {"eth0": [1.5, 2.0]}, "memory": {"bytes": 5, "limitBytes": 9}, "ranks": [0, 1],
        "cpu": {"cores": 1.5, "limitCores": 2}, "rankLoads": [{"rank": 0, "cores": 0.5, "bytes": 7, "gpu": 0}], "gpuProblem": "why",
            "gpus": [{"index": 0, "uuid": "GPU-1", "name": "H100", "bytes": 1, "limitBytes": 2, "percentage": 3, "celsius": 4, "watts": 5,
                "limitWatts": 6}], "curve": {"10": {"loss": 0.5}}}  # fmt: skip
    assert read_node({**answer, "node": 0, "problem": "forged"}) == answer
    assert read_steps({"steps": {"1": {"loss": 2.0}}}) == {"1": {"loss": 2.0}}


@pytest.mark.parametrize("text", NONSENSE)
def test_what_is_no_object_is_told_with_how_it_begins(text: bytes) -> None:
    with pytest.raises(ProgramFailed, match=r"python3 in pod x-0 says .* which is not a valid answer") as raised:
        answer_of(text, "pod x-0")
    assert len(str(raised.value)) < 700


class Says:
    """A program in a pod that prints these pieces."""

    place = PodPlace(FakeCluster().as_cluster, "n", "x-0", "trainer")
    code = 0

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    async def read(self) -> bytes:
        return next(self._pieces, b"")

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        for piece in self._pieces:
            yield STDOUT, piece


def says(*pieces: bytes, times: int = 1) -> Program:
    return cast(Program, Says(piece for _ in range(times) for piece in pieces))


async def all_lines(running: Program) -> list[bytes]:
    return [line async for line in lines_in(running)]


def test_lines_are_whole_however_they_come() -> None:
    assert asyncio.run(all_lines(says(b"on", b"e\ntw", b"o\n\nrest"))) == [b"one", b"two", b""]


def test_a_line_without_an_end_is_given_up() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProgramFailed, match=f"prints a line of more than {LINE_BYTES_MAX} bytes"):
            asyncio.run(all_lines(says(bytes(1 << 18), times=1000)))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


async def heard(running: Program) -> tuple[str, int | None]:
    listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    why = await _hear(running, listens, asyncio.Event(), lambda text: None)
    return why, listens.result() if listens.done() else None


@pytest.mark.parametrize("text", [*NONSENSE[1:], b'{"x":' * 100_000])
def test_an_editors_server_that_answers_nonsense_has_failed(text: bytes) -> None:
    with pytest.raises(Failed, match=r"not a valid answer|doesn't end its answer"):
        asyncio.run(heard(says(text + b"\n", bytes(1 << 18), b"x")))


def test_of_an_editors_server_only_ports_and_words_are_taken() -> None:
    assert asyncio.run(heard(says(b'{"port": -1}\n{"port": "22"}\n{"port": 99999}\n{"port": 8888}\n'))) == ("", 8888)
    why, port = asyncio.run(heard(says(json.dumps({"failed": {"a": 1}, "said": ["x" * 900] * 200}).encode() + b"\n")))
    assert port is None and len(why) == 20_000
    assert asyncio.run(heard(says(b'{"failed": "no", "said": 3}\n')))[0] == "no"


@pytest.mark.parametrize(("size", "is_taken"), [(1 << 18, True), ((1 << 18) + 1, False)])
def test_a_line_of_an_editors_server_has_at_most_256_kibibytes(size: int, is_taken: bool) -> None:
    with contextlib.nullcontext() if is_taken else pytest.raises(ProgramFailed, match="doesn't end its answer"):
        assert asyncio.run(heard(says(bytes(size)))) == ("", None)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{", "[" * 100_000, '{"gpus": []}', '{"hcas": 1}', '{"memlockBytes": "x"}', '{"interfaces": {"a": null}}',
        '{"capabilities": "no"}', json.dumps({"driver": "x" * 201}), json.dumps({"interfaces": {str(number): 1 for number in range(257)}}),
    ],
)  # fmt: skip
def test_a_probe_that_says_something_else_has_seen_nothing(text: str) -> None:
    facts = read_probe({"spec": {"nodeName": "a"}}, [PROBED + text])
    assert facts.node == "a" and facts.error.endswith("which is no probe's answer")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"bytes": "x"}', '{"bytes": 0, "microseconds": 1, "ranks": 1}', '{"checks": 3}']
)
def test_a_line_that_looks_like_a_result_is_none(text: str) -> None:
    assert point_in(SWEEP_POINT + text) is None
    assert result_in(PREFLIGHT_RESULT + text) is None


@pytest.mark.parametrize("data", [None, {}, {"run.json": "[]"}, {"run.json": "{"}, {"run.json": "[" * 100_000}])
def test_a_frozen_run_that_somebody_else_wrote_is_none(data: Any) -> None:
    item = {"kind": "ConfigMap", "metadata": {"name": "x-run-1"}, **({} if data is None else {"data": data})}
    job = {"metadata": {"name": "x", "namespace": "ns"}, "status": {"run": {"name": "x-run-1"}}}
    assert asyncio.run(frozen_run(FakeCluster(item).as_cluster, job)) == {}


def test_what_is_remembered_of_a_log_has_limits() -> None:
    failures = RankFailures()
    for number in range(20_000):
        failures.add(f"[rank {number}] {'x' * 20_000}")
        failures.add(f"[lockstep] rank {number} on node 0 exited with 1")
    failures.add(f"[rank {'9' * 5000}] x")
    assert len(failures.failures) == 10_000
    assert sum(len(line) for one in failures.failures for line in one.lines) < 256 * 8192 + 1
    assert list(error_lines({}, failures.failures))


class Response:
    """A log as aiohttp gives it."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.content, self._pieces = self, pieces

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece

    def close(self) -> None:
        pass


def test_a_logs_line_without_an_end_comes_in_pieces() -> None:
    async def read(pieces: list[bytes]) -> list[bytes]:
        return [line async for line in _lines(Response(pieces), LOG_LINE_BYTES_MAX)]

    assert asyncio.run(read([b"a\nb", b"c\n", b"\nd"])) == [b"a", b"bc", b"", b"d"]
    lines = asyncio.run(read([bytes(1 << 16)] * 20))
    assert b"".join(lines) == bytes(20 << 16) and max(map(len, lines)) == LOG_LINE_BYTES_MAX


def archive(*members: tuple[str, bytes, int]) -> bytes:
    """(name, type, stated size)"""
    data = b""
    for name, kind, size in members:
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, size
        data += info.tobuf() + b"x" * 512
    return data + bytes(1024)


def test_a_bundle_takes_only_plain_files_that_came_whole() -> None:
    data = archive(
        ("a", tarfile.REGTYPE, 512), ("../b", tarfile.REGTYPE, 512), ("/c", tarfile.REGTYPE, 512), ("d/../../e", tarfile.REGTYPE, 512)
    )
    assert dict(bundle._unpacked(data)) == {"a": b"x" * 512}
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        assert dict(bundle._unpacked(archive(("l", kind, 0))[:512] + bytes(1024))) == {}


@pytest.mark.parametrize(
    "data", [b"x" * 2048, archive(("a", tarfile.REGTYPE, 1 << 33)), archive(("a", tarfile.REGTYPE, 512))[:700], archive(("a",
        tarfile.GNUTYPE_SPARSE, 1 << 40))]
)  # fmt: skip
def test_an_archive_that_lies_costs_neither_memory_nor_a_traceback(data: bytes) -> None:
    tracemalloc.start()
    try:
        files: list[Any] = []
        with contextlib.suppress(ProgramFailed):
            files += bundle._unpacked(data)
        assert files == []
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_tar_of_many_names_is_cut_after_20000(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = iter([SimpleNamespace(offset=number, name="x", type=tarfile.DIRTYPE, size=0) for number in range(20_005)])
    monkeypatch.setattr(tarfile, "open", lambda **_: contextlib.nullcontext(entries))
    assert list(bundle._unpacked(b"")) == [] and len(list(entries)) == 5


def headers(kind: bytes, name: str, data: bytes, times: int) -> bytes:
    """An archive of so many headers of this kind before a file."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    return (info.tobuf(format=tarfile.GNU_FORMAT) + data.ljust(512, b"\0")) * times + archive(("a", tarfile.REGTYPE, 512))


BACKWARDS = bytearray(archive(("a", tarfile.REGTYPE, 0))[:512] + bytes(1024))
"""A file of -512 bytes, with a right checksum."""
BACKWARDS[124:136] = b"\xff" * 10 + b"\xfe\x00"
BACKWARDS[148:156] = b"%06o\0 " % (256 + sum(BACKWARDS[:148]) + sum(BACKWARDS[156:512]))


@pytest.mark.parametrize(
    "data",
    [
        headers(tarfile.GNUTYPE_LONGNAME, "././@LongLink", b"abcd\0", 5000),
        headers(tarfile.GNUTYPE_LONGLINK, "././@LongLink", b"abcd\0", 5000),
        headers(tarfile.XHDTYPE, "x", b"11 path=abc\n", 5000),
        headers(tarfile.XHDTYPE, "x", b"19 size=9999999999\n", 1),
        headers(tarfile.XHDTYPE, "x", b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n29 GNU.sparse.realsize=1<<40\n", 1),
        archive(("z", tarfile.REGTYPE, 0))[:512] + bytes(BACKWARDS),
    ],
)
def test_an_archive_whose_headers_never_end_is_none(data: bytes) -> None:
    with pytest.raises(ProgramFailed, match="python3 in the pod did not send a valid archive"):
        list(bundle._unpacked(data))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_bytes_of_an_archive_are_changed_it_is_read_or_refused(seed: int) -> None:
    chance, buffer = random.Random(seed), io.BytesIO()  # noqa: S311 (repeatable, not secret)
    with tarfile.open(fileobj=buffer, mode="w", format=chance.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) as tar:
        for name, size in (("a/b", 700), ("l" * 200, 10), ("ü" * 60, 0)):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = size, 1
            tar.addfile(info, io.BytesIO(b"x" * size))
    data = bytearray(buffer.getvalue()[:6000])
    for _ in range(4):
        block = chance.randrange(len(data)) // 512 * 512
        at, value = chance.choice([(124, b"\xff" * 12), (124, b"\x80" + b"\xff" * 11), (124, b"7" * 11), (156, b"L"), (156, b"x"),
            (156, b"S"), (0, b"../"), (0, b"/")])  # fmt: skip
        data[block + at : block + at + len(value)] = value
        data[block + 148 : block + 156] = b"%06o\0 " % (256 + sum(data[block : block + 148]) + sum(data[block + 156 : block + 512]))
    with contextlib.suppress(ProgramFailed):
        for name, content in bundle._unpacked(bytes(data)):
            assert not name.startswith("/") and ".." not in name.split("/") and len(content) <= len(data)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\u202eb", "a\\..\\..\\b", "C:x", "a\tb", "x" * 300, "d/" * 600 + "x", "a\u200bb"])
def test_a_bundle_has_no_name_that_acts_or_leads_elsewhere_on_another_system(name: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for one in (name, "good"):
            tar.addfile(tarfile.TarInfo(one))
    assert dict(bundle._unpacked(buffer.getvalue())) == {"good": b""}


@pytest.mark.parametrize("name", [".", "..", "../secrets/x", "a/b", "x?watch=true", "x#y", "ü"])
def test_a_name_of_an_object_leads_to_no_other_object(name: str) -> None:
    """Names that statuses and pods give are quoted from what people wrote."""
    before = path_of("ConfigMap", "ns", "x").rpartition("/")[0]
    for make in (lambda: path_of("ConfigMap", "ns", name), lambda: path_of("ConfigMap", name, "x")):
        with contextlib.suppress(ConfigError):
            path = make()
            assert path.count("/") == before.count("/") + 1 and not set("?#") & set(path) and path.isascii()
    for dots in (".", ".."):
        with pytest.raises(ConfigError, match="is not a valid name of an object"):
            path_of("Pod", dots, "x")


def test_a_line_that_comes_byte_by_byte_is_copied_once() -> None:
    """What comes is added to what is there: a copy of all with each byte would take minutes."""
    length = 1 << 20
    assert asyncio.run(all_lines(says(*[b"x"] * length, b"\n"))) == [b"x" * length]


class Logging(FakeCluster):
    """A cluster whose pods have printed much, and that counts who asked for it."""

    asked = 0

    async def log(self, namespace: str, pod: str, container: str, query: dict[str, str]) -> AsyncIterator[str]:
        self.asked += 1
        for _ in range(10):
            yield "x" * 1000


def test_a_bundle_of_many_pods_has_a_bound_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "BUNDLE_BYTES_MAX", 30_000)
    status = {"phase": "Pending", "containerStatuses": [{"name": "trainer"}]}
    pods = tuple(
        {"kind": "Pod", "metadata": {"name": f"x-{n}", "namespace": "n", "uid": str(n)}, "spec": {}, "status": status} for n in range(20)
    )
    job = {"metadata": {"name": "x", "namespace": "n", "uid": "u"}, "spec": {}, "status": {}}
    cluster = Logging()
    missing = asyncio.run(bundle.write_bundle(tmp_path / "x.tar.gz", cluster.as_cluster, Observed(job=job, pods=pods), "why"))
    assert 0 < cluster.asked <= 4
    assert sum(line.startswith("logs of pod x-") and line.endswith("MiB already") for line in missing) == 20 - cluster.asked
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        assert sum(name.endswith("/trainer.log") for name in archive.getnames()) == cluster.asked


def run_of_an_ended_job(folder: Path, monkeypatch: pytest.MonkeyPatch, volumes: list[int]) -> Observed:
    """A job without pods, whose run's folder is here. What would run in a pod runs as a process."""

    @asynccontextmanager
    async def beside(cluster: Any, namespace: str, job: str, node: int, **_: Any) -> AsyncIterator[PodPlace]:
        yield PodPlace(cluster, namespace, f"{job}-files-{node}", "files")

    async def output_of(place: PodPlace, command: list[str], *, stdin: bytes, **_: Any) -> bytes:
        return subprocess.run([sys.executable, *command[1:]], input=stdin, capture_output=True, check=True).stdout  # noqa: ASYNC221 (a moment, once)

    async def nodes_with_volumes(*_: Any) -> list[int]:
        return volumes

    (folder / "logs").mkdir()
    (folder / "logs" / "stacks.txt").write_text("Thread 1: all_reduce\n")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "shard").write_text("gigabytes")
    for name, stand_in in (("beside", beside), ("nodes_with_volumes", nodes_with_volumes)):
        monkeypatch.setattr(bundle, name, stand_in)
    monkeypatch.setattr(programs, "output_of", output_of)
    monkeypatch.setattr(bundle, "run_folder", lambda job: str(folder))
    job = {"metadata": {"name": "x", "namespace": "n", "uid": "u"}, "spec": {}, "status": {}}
    claims = [{"metadata": {"name": "workspace"}}] if len(volumes) > 1 else []
    stateful_set = {
        "kind": "StatefulSet",
        "metadata": {"name": "x", "namespace": "n", "uid": "s"},
        "spec": {"volumeClaimTemplates": claims},
    }
    return Observed(job=job, objects={("StatefulSet", "x"): stateful_set})


@pytest.mark.parametrize(
    ("volumes", "names"), [([0], ["run/logs/stacks.txt"]), ([0, 1], ["run/x-0/logs/stacks.txt", "run/x-1/logs/stacks.txt"])]
)
def test_a_bundle_of_an_ended_job_has_the_logs_and_stacks_of_its_volume(
    volumes: list[int], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    observed = run_of_an_ended_job(folder, monkeypatch, volumes)
    missing = asyncio.run(bundle.write_bundle(tmp_path / "x.tar.gz", Logging().as_cluster, observed, "why"))
    assert missing == []
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        found = [name.split("/", 1)[1] for name in archive.getnames()]
        assert sorted(name for name in found if name.startswith("run/")) == names
        file = archive.extractfile(next(name for name in archive.getnames() if name.endswith("stacks.txt")))
        assert file is not None and file.read() == b"Thread 1: all_reduce\n"


def test_of_an_ended_job_sixteen_volumes_are_read_and_the_others_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []

    async def add(place: PodPlace, source: str, folder: str, *_: Any) -> None:
        folders.append(folder)

    observed = run_of_an_ended_job(tmp_path, monkeypatch, list(range(20)))
    monkeypatch.setattr(bundle, "_add_from", add)
    missing = asyncio.run(bundle.write_bundle(tmp_path / "x.tar.gz", Logging().as_cluster, observed, "why"))
    assert folders == [f"run/x-{node}" for node in range(16)] and "on the volumes of nodes 16 to 19: " in missing[0]


def test_of_files_that_a_pod_says_were_changed_some_are_named() -> None:
    lines = _sync_lines(Synced("x-0", changed=tuple(f"{number}-{'x' * 10_000}" for number in range(100_000))))
    assert len(lines) == NAMES_MAX + 2 and max(map(len, lines)) < 700
    assert lines[-1] == f"x-0: {100_000 - NAMES_MAX} more files were changed there, too"
    assert len(_sync_lines(Synced("x-0", changed=("a", "b")))) == 3


def test_the_words_of_an_ending_have_a_bound() -> None:
    assert len(ending_of({"status": "Failure", "message": "x " * (1 << 20)})[1]) <= 2000
