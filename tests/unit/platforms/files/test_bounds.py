"""Programs elsewhere, and files that come and go: how much is read of them, how often they are tried, and how long they are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.api.errors import Failed
from lockstep.platforms.files import results, transfer
from lockstep.platforms.files import sending as sending_module
from lockstep.platforms.files.reader import beside
from lockstep.platforms.files.sync import Synced
from lockstep.platforms.files.transfer import TransferProgress
from lockstep.platforms.jobs.processes import ProcessProgram
from lockstep.platforms.kubernetes import files as verb
from lockstep.platforms.kubernetes.job import KubernetesJob
from lockstep.platforms.places.values import Use
from lockstep.programs import STDERR, STDOUT, Broken, Program, ProgramFailed, output_of
from support.fake_cluster import FakeCluster
from unit.platforms.files.test_reader import claim, stateful_set
from unit.platforms.files.test_sync_watch import cluster
from unit.silent_place import SilentPlace, SilentProgram
from unit.virtual_time import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(0.0)


class Talking(SilentProgram):
    """It prints such pieces without an end."""

    def __init__(self, place: SilentPlace, channel: int, piece: bytes) -> None:
        super().__init__(place)
        self.channel, self.piece, self.printed = channel, piece, 0

    async def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        while self.printed < 100:
            self.printed += 1
            yield self.channel, self.piece
            await asyncio.sleep(0)


class TalkingPlace(SilentPlace):
    def __init__(self, channel: int, piece: bytes) -> None:
        super().__init__()
        self.talking = Talking(self, channel, piece)

    @asynccontextmanager
    async def program(self, *_: object, **__: object) -> AsyncIterator[Program]:
        yield self.talking


def test_of_output_that_is_collected_16_mebibytes_are_read() -> None:
    place = TalkingPlace(STDOUT, bytes(1 << 20))
    with pytest.raises(ProgramFailed, match="cat prints more than 16777216 bytes"):
        asyncio.run(output_of(place, ["cat"]))
    assert place.talking.printed == 17


def test_of_what_a_program_complains_of_64_kibibytes_are_kept_and_2000_characters_said() -> None:
    place = TalkingPlace(STDERR, b"x" * 3000)
    with pytest.raises(ProgramFailed) as raised:
        asyncio.run(output_of(place, ["cat"]))
    assert len(place.talking.errors) == 64 << 10
    assert str(raised.value).endswith(f"after: {'x' * 2000}")


def pieces_of(read: Callable[[asyncio.StreamReader, list[int]], Any]) -> list[int]:
    """Sizes in which a stream that has 600 KiB ready is passed on."""
    sizes: list[int] = []

    async def story() -> None:
        stream = asyncio.StreamReader(limit=1 << 20)
        stream.feed_data(bytes(600 << 10))
        stream.feed_eof()
        await read(stream, sizes)

    asyncio.run(story())
    return sizes


async def read_here(stream: asyncio.StreamReader, sizes: list[int]) -> None:
    program = ProcessProgram.__new__(ProcessProgram)
    program._pieces = asyncio.Queue()
    await program._read(STDOUT, stream)
    while not program._pieces.empty():
        sizes.append(len(program._pieces.get_nowait()[1]))


async def pump_up(stream: asyncio.StreamReader, sizes: list[int]) -> None:
    async def write(data: bytes) -> None:
        sizes.append(len(data))

    await transfer._up(stream, cast(Any, SimpleNamespace(write=write)), cast(Any, SimpleNamespace(shutdown=lambda how: sizes.append(0))))


@pytest.mark.parametrize("read", [read_here, pump_up])
def test_bytes_are_passed_on_in_pieces_of_256_kibibytes(read: Any) -> None:
    assert pieces_of(read) == [256 << 10, 256 << 10, 88 << 10, 0]


def test_an_answer_about_an_adapter_has_at_most_64_kibibytes() -> None:
    answer = b'{"adapter": null, "commit": null}'
    assert results._folders(answer.rjust(64 << 10), "/w/runs/x", "pod x-0") == (None, None)
    with pytest.raises(results.NoAdapter):
        results._folders(answer.rjust((64 << 10) + 1), "/w/runs/x", "pod x-0")


def test_a_pod_that_lacks_something_is_sent_to_after_two_seconds_and_a_change_is_seen_in_a_fifth_of_one(
    clock: VirtualClock, tmp_path: Path
) -> None:
    sent: list[float] = []

    class Ended:
        are_there = False

    async def send() -> list[Synced]:
        sent.append(clock.now)
        if len(sent) == 4:
            raise asyncio.CancelledError
        return [Synced("x-0", problem="away" if len(sent) < 2 else None)]

    sending = sending_module.Sending("x", tmp_path, "/w", "-n ns", watch=True)
    with suppress(asyncio.CancelledError):
        clock.run(sending_module.send_all(sending, cast(Any, Ended()), send, lambda: verb._is_over(cluster().as_cluster, "ns", "x")))
    assert sent == pytest.approx([0.0, 2.0, 2.2, 2.4])


def test_of_many_files_fifty_are_named_and_the_others_counted() -> None:
    first, *named = sending_module._lines(Synced("x-0", removed=tuple(f"f{number}" for number in range(60))))
    assert first == "x-0: 0 sent (0 bytes), 60 removed"
    assert len(named) == 51 and named[-1] == "x-0: 10 more files were removed, too"


async def look_beside(there: FakeCluster) -> None:
    async with beside(there.as_cluster, "ns", "x"):
        pass


async def look_to_fill(there: FakeCluster) -> None:
    target: Any = SimpleNamespace(namespace="ns", client=SimpleNamespace(connected=lambda: nullcontext(there.as_cluster)))
    job = KubernetesJob(target, {"metadata": {"namespace": "ns", "name": "x"}}, cast(Any, None))
    async with job.volume(0, print, Use.FILL):
        pass


@pytest.mark.parametrize(
    ("work", "seconds"), [(look_beside, 3600), (look_to_fill, 86400)],
        ids=["look", "fetch"]
)  # fmt: skip
def test_a_pod_that_is_left_behind_ends_after_an_hour_and_one_that_fetches_a_model_after_a_day(work: Any, seconds: int) -> None:
    deadlines: list[int] = []

    def create(item: dict[str, Any]) -> None:
        if item["kind"] == "Pod":
            deadlines.append(item["spec"]["activeDeadlineSeconds"])
            raise Failed("enough")

    with pytest.raises(Failed, match="enough"):
        asyncio.run(work(FakeCluster(stateful_set("PerPod"), claim("workspace-x-0"), claim("datasets-x-0"), on_create=create)))
    assert deadlines == [seconds]


@pytest.mark.parametrize(("missing", "pauses"), [([7], [2, 4, 8, 15, 15]), ([9, 9, 9, 5], [2, 4, 8, 1, 2, 4, 8, 15, 15])])
def test_a_transfer_that_gets_nowhere_is_tried_six_times_with_growing_pauses(
    clock: VirtualClock, missing: list[int], pauses: list[float]
) -> None:
    """`missing`: what the other end lacks in each try, the last for ever."""
    begun: list[float] = []
    progress = TransferProgress()

    class Breaking(SilentPlace):
        @asynccontextmanager
        async def program(self, *_: object, **__: object) -> AsyncIterator[Program]:
            begun.append(clock.now)
            progress.missing = missing[: len(begun)][-1]
            raise Broken("the connection broke")
            yield

    with pytest.raises(Failed, match="the connection broke; what has arrived is kept"):
        clock.run(transfer.get(Breaking(), "/w/a", "a", ["/w"], progress))
    assert [later - first for first, later in pairwise(begun)] == pauses
