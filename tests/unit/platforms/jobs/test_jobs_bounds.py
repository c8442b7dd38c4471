"""Limits of what is done for a job from a laptop: signs of life, waits, and how much of a pod's answer is taken."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.api.errors import Failed
from lockstep.kube.cluster import ApiError
from lockstep.plan.observed import Observed
from lockstep.plan.pages.logs import LogSelection
from lockstep.plan.pages.redact import Redactor
from lockstep.platforms.jobs import bundle, editor, terminal, top
from lockstep.platforms.jobs.logs import lines
from lockstep.platforms.places import drilledjob, drills
from lockstep.platforms.places.drilledjob import DrilledJob, VerbStream
from lockstep.programs import Program
from support.fake_cluster import FakeCluster
from support.process_place import ProcessPlace
from unit.platforms.files.test_reader import claim, stateful_set
from unit.silent_place import SilentPlace, SilentProgram
from unit.virtual_time import VirtualClock

Object = dict[str, Any]
JOB: Object = {"kind": "TrainingJob", "metadata": {"name": "x", "namespace": "ns", "uid": "u"}, "spec": {"nodes": 1}, "status": {}}


class WrittenPlace(SilentPlace):
    """A silent place that notes when something is written there. Its programs end after so many seconds."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.written: list[tuple[float, bytes]] = []

    @asynccontextmanager
    async def program(self, *_: Any, **__: Any) -> AsyncIterator[Program]:
        yield WrittenProgram(self)


class WrittenProgram(SilentProgram):
    def __init__(self, place: WrittenPlace) -> None:
        super().__init__(place)
        self.noted, self.begun = place, place.clock.now

    async def write(self, data: bytes | memoryview) -> None:
        self.noted.written.append((self.noted.clock.now - self.begun, bytes(data)))

    async def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        await asyncio.sleep(self.noted.seconds)
        self.code = 0
        for nothing in ():
            yield nothing


def drilled(place: SilentPlace) -> DrilledJob:
    @asynccontextmanager
    async def volume(*_: object) -> AsyncIterator[object]:
        yield SimpleNamespace(place=place, run_folder=lambda name: "/x")

    return DrilledJob(cast(Any, SimpleNamespace(volume=volume, name="x")), {"attempts": 1, "nodes": 2}, 900.0, lambda text: None)


async def serve(place: SilentPlace) -> None:
    async with editor.served(place, editor.EditorRequest("jupyter"), lambda text: None):
        pass


@pytest.mark.parametrize(
    ("work", "message", "seconds"),
    [
        (lambda place: VerbStream(drilled(place), 0, "watch")._follow(), b".\n", 10),
        (serve, b"on\n", 15),
        (lambda place: terminal.run_on_all_nodes(place, ["python3"]), b".", 30),
    ],
    ids=["drill", "editor", "run"],
)
def test_a_program_hears_a_sign_of_life_every_so_many_seconds(
    work: Callable[[SilentPlace], Coroutine[Any, Any, Any]], message: bytes, seconds: int
) -> None:
    clock = VirtualClock()
    place = WrittenPlace(clock, 3.5 * seconds)
    clock.seconds_of(work(place))
    assert [when for when, data in place.written if data == message] == pytest.approx([seconds, 2 * seconds, 3 * seconds])


def test_a_verb_of_a_drill_has_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(asyncio, "run", clock.run)
    begun = clock.now
    with pytest.raises(Failed, match="has not ended after 600 s"):
        drilled(SilentPlace()).on_node(0, "corrupt", rank=1)
    assert clock.now - begun == 600


def test_a_rank_has_half_a_minute_to_be_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(drilledjob, "time", clock)
    monkeypatch.setattr(VerbStream, "_listen", lambda stream: None)
    monkeypatch.setattr(DrilledJob, "on_node", lambda *_, **__: {})
    begun = clock.now
    with pytest.raises(Failed, match="rank 3 was not frozen: node 1 says nothing"), drills._frozen(drilled(SilentPlace()), 1, 3):
        pass
    assert clock.now - begun == pytest.approx(30, abs=0.1)


async def read_lines(cluster: FakeCluster, folder: Path) -> None:
    async for _ in lines(cluster.as_cluster, JOB, LogSelection(), lambda text: None):
        pass


async def write_bundle(cluster: FakeCluster, folder: Path) -> None:
    observed = Observed(job=JOB, objects={("StatefulSet", "x"): cluster.objects["StatefulSet", "x"]})
    await bundle.write_bundle(folder / "x.tar.gz", cluster.as_cluster, observed, "why")


@pytest.mark.parametrize(
    ("read", "seconds"),
    [
        (read_lines, 600),
        (write_bundle, 900),
        (lambda cluster, _: top.curve_on_volume(cluster.as_cluster, "ns", "x", 9, lambda text: None), 600),
    ],
    ids=["log", "bundle", "curve"],
)  # fmt: skip
def test_a_pod_that_shows_a_volume_ends_by_itself_after_so_many_seconds(
    read: Callable[[FakeCluster, Path], Coroutine[Any, Any, Any]], seconds: int, tmp_path: Path
) -> None:
    deadlines: list[int] = []

    def refuse(item: Object) -> None:
        if item["kind"] == "Pod":
            deadlines.append(item["spec"]["activeDeadlineSeconds"])
            raise ApiError(403, "Forbidden", "no")

    cluster = FakeCluster(stateful_set("PerPod"), claim("workspace-x-0"), claim("datasets-x-0"), on_create=refuse)
    with contextlib.suppress(Failed):
        asyncio.run(read(cluster, tmp_path))
    assert deadlines == [seconds]


async def test_a_bundle_has_20000_lines_and_32_mebibytes_of_each_log() -> None:
    queries: list[Mapping[str, str]] = []

    class Logged(FakeCluster):
        async def log(self, namespace: str, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
            queries.append(query)
            yield "a line"

    pod = {"metadata": {"name": "x-0", "namespace": "ns"}, "status": {"containerStatuses": [{"name": "trainer"}]}}
    assert len([piece async for piece in bundle._logs(Logged().as_cluster, pod, Redactor(frozenset()), [], 0.0)]) == 1 and queries == [
        {"tailLines": "20000", "limitBytes": str(32 << 20)}
    ]


def test_of_a_file_of_a_run_the_last_2_mebibytes_are_in_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(b"a" * (1 << 20) + b"\n" * (2 << 20))
    pieces, missing, nothing_secret = list[bundle.Piece](), list[str](), cast(Any, SimpleNamespace(text=str, object=str))
    asyncio.run(bundle._add_from(ProcessPlace(), str(tmp_path), "run", nothing_secret, missing, pieces))
    assert missing == [] and [(piece.path, piece.data == b"\n" * (2 << 20)) for piece in pieces] == [("run/x.log", True)]


def test_a_pod_s_archive_is_read_no_further_than_80_mebibytes() -> None:
    block, blocks = bytes(1 << 20), itertools.count(1)

    class Talking(SilentProgram):
        async def read(self) -> bytes:
            return block if next(blocks) < 90 else b""

    class TalkingPlace(SilentPlace):
        @asynccontextmanager
        async def program(self, command: Sequence[str], **_: Any) -> AsyncIterator[Program]:
            yield Talking(self)

    missing: list[str] = []
    asyncio.run(bundle._add_from(TalkingPlace(), "/x", "run", Redactor(frozenset()), missing, []))
    assert "prints more than 83886080 bytes" in missing[0] and next(blocks) == 82


@pytest.mark.parametrize(("size", "is_taken"), [(16 << 20, True), ((16 << 20) + 1, False)])
def test_a_script_of_more_than_16_mebibytes_is_not_compared(size: int, is_taken: bool, tmp_path: Path) -> None:
    with (tmp_path / "train.py").open("wb") as file:
        file.truncate(size)
    assert bool(terminal.digest_here(["train.py"], tmp_path)) is is_taken
