"""So long this machine waits for hosts, so often it says that it is there, and so much it takes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.api.errors import Failed
from lockstep.api.hosts import Host, HostsCluster
from lockstep.plan.cluster.hardware import MeasuredRail, RailEnd
from lockstep.platforms.hosts import checkup, environment, forward, volumes
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.place import HostPlace, HostProgram, TerminalProgram
from lockstep.platforms.hosts.shortruns import _follow
from lockstep.programs import Program
from unit.platforms.hosts.test_start_limits import Fallen
from unit.silent_place import SilentPlace, SilentProgram
from unit.virtual_time import VirtualClock

NONE = cast(Any, None)


def test_a_host_of_a_short_run_hears_that_this_machine_is_there() -> None:
    clock, heard = VirtualClock(0.0), list[float]()

    class Hearing(SilentProgram):
        async def write(self, data: bytes | memoryview) -> None:
            heard.append(clock.now)

    clock.seconds_of(asyncio.wait_for(_follow(Hearing(SilentPlace()), print), 35.0))
    assert heard == [10.0, 20.0, 30.0]


def test_a_rate_is_measured_for_a_moment_and_twice_for_a_second_where_it_seems_slow() -> None:
    asked: list[float] = []

    async def ask(what: str, **request: Any) -> dict[str, Any]:
        asked.append(request["seconds"])
        return {"gbs": 0.001}

    programs = dict.fromkeys((0, 1), cast(Any, SimpleNamespace(ask=ask)))
    rail = MeasuredRail("hosts", dict.fromkeys((0, 1), RailEnd("eth0", "10.0.0.1")))
    asyncio.run(checkup._measure(programs, "t", rail, {0: 1, 1: 1}, {(0, 1)}))
    assert asked == [0.3, 1.0, 1.0]


@pytest.mark.parametrize(("work", "seconds"), [(environment.set_up, 4 * 3600.0), (environment.try_gpus, 300.0)], ids=["made", "GPUs"])
def test_an_environment_has_four_hours_to_be_made_and_its_gpus_five_minutes(
    monkeypatch: pytest.MonkeyPatch, work: Callable[..., Coroutine[Any, Any, Any]], seconds: float
) -> None:
    monkeypatch.setattr(environment, "HostPlace", lambda *_: SilentPlace())
    monkeypatch.setattr(SilentPlace, "shared", None, raising=False)
    parts = SimpleNamespace(home="/home/ada")
    setup = SimpleNamespace(host=Host(name="lab0"), parts=parts, environment="e", path="/e", lingers=False, folders=(), makes=False)
    arguments = (SimpleNamespace(place=lambda _: SilentPlace()), setup, None, print)
    assert VirtualClock().seconds_of(work(*arguments[: 4 if work is environment.set_up else 2])) == pytest.approx(seconds)


@pytest.mark.parametrize(("stated", "seconds"), [(False, 0.3), (True, 30.0)])
def test_marks_of_other_hosts_are_looked_for_shortly_and_longer_where_a_file_system_was_stated(
    monkeypatch: pytest.MonkeyPatch, stated: bool, seconds: float
) -> None:
    programs: list[Fallen] = []

    class Answering(SilentPlace):
        @contextlib.asynccontextmanager
        async def program(self, *_: object, **__: object) -> AsyncIterator[Program]:
            programs.append(Fallen(fleet, "lab0", b'{"mark": "m"}', b'{"seen": []}'))
            yield programs[-1]

    monkeypatch.setattr(Fleet, "place", lambda *_: Answering())
    fleet = Fleet(HostsCluster(hosts=[Host(name="lab0"), Host(name="lab1")], ports="29400-29449"), "lab", "lab")
    VirtualClock().run(volumes.sharing(fleet, {"lab0": "/a", "lab1": "/a"}, stated=stated))
    assert [json.loads(program.written.splitlines()[-1])["seconds"] for program in programs] == [seconds] * 2


def test_a_port_that_is_taken_just_before_its_use_is_chosen_anew_five_times() -> None:
    tries: list[str] = []

    async def control(*words: str) -> tuple[int, str]:
        tries.append(words[-1])
        return 255, "in use"

    shared = SimpleNamespace(control=control, login=SimpleNamespace(name="lab0"))

    async def forwards() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await forward._forward(cast(Any, shared), 8888, 0, stack)

    with pytest.raises(Failed, match="host lab0 forwards no port: in use"):
        asyncio.run(forwards())
    assert len(tries) == 1 + 5


def test_what_is_typed_into_a_host_s_terminal_goes_there_in_frames_of_256_kibibytes() -> None:
    written: list[int] = []

    class Typing(TerminalProgram):
        def __init__(self) -> None:
            pass

        async def _send(self, data: bytes | memoryview) -> None:
            written.append(len(data) - 5)

    asyncio.run(Typing().write(bytes((1 << 19) + 1)))
    assert written == [1 << 18, 1 << 18, 1]


def test_of_a_program_that_prints_unread_eight_pieces_wait_here() -> None:
    reads: list[int] = []

    class Endless:
        async def read(self, size: int) -> bytes:
            reads.append(size)
            return b"x"

    async def unread() -> None:
        shared = cast(Any, SimpleNamespace(login=None))
        process = cast(Any, SimpleNamespace(stdout=Endless(), stderr=asyncio.StreamReader()))
        program = HostProgram(HostPlace(shared), NONE, process)
        await asyncio.wait(program._readers, timeout=1.0)
        for reader in program._readers:
            reader.cancel()
        await asyncio.gather(*program._readers, return_exceptions=True)

    VirtualClock().run(unread())
    assert reads == [1 << 18] * (8 + 1)
