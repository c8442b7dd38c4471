"""The connections of a big gang: its agents come back one after the other, and their coordinator waits that long for them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_gang.agent import link, outbox
from lockstep_gang.agent.outbox import Outbox
from lockstep_gang.contract.messages import Hello, message_to_json
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import progress_seconds, reconnect_seconds, spread_seconds
from lockstep_gang.coordinator import channels, coordinator, server
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.lifecycle.decide import decide
from lockstep_gang.lifecycle.gang import Node, Phase, Rank, new_gang
from lockstep_gang.lifecycle.hang import deadlines, suspects
from lockstep_gang.lifecycle.observe import connection_closed
from lockstep_gang.lifecycle.progress import Progress
from unit.gang.cases import KEY
from unit.gang.served import listening
from unit.gang.test_scale import Untold, run_of, training, until
from unit.virtual_time import VirtualClock

RECONNECT_SECONDS = 5.0
SILENT_SECONDS = 12.0


def test_a_closed_connection_of_a_big_gang_has_longer_to_come_back() -> None:
    assert (reconnect_seconds(2), spread_seconds(64)) == (RECONNECT_SECONDS, 0.0)
    assert RECONNECT_SECONDS + 5 < reconnect_seconds(1024) < 15  # an agent is quiet for 15 s before it connects again
    assert progress_seconds(16) == 2.0
    assert 5.0 < progress_seconds(8192) <= 10.0


def test_a_node_of_a_big_gang_is_lost_only_after_that_longer_time() -> None:
    run = run_of(256)
    gang = connection_closed(training(run), 5, 1002.0)
    assert decide(gang, run, 1002.0 + RECONNECT_SECONDS + 0.5).gang.phase is Phase.ACTIVE
    assert decide(gang, run, 1002.0 + reconnect_seconds(256) + 0.1).gang.phase is Phase.STOPPING


async def test_a_big_gang_s_coordinator_may_open_a_file_for_each_node_and_looks_for_garbage_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[int] = []
    thresholds: list[tuple[int, ...]] = []
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (1024, 65536))
    monkeypatch.setattr(server.resource, "setrlimit", lambda _, limits: files.append(limits[0]))
    monkeypatch.setattr(server.gc, "set_threshold", lambda *given: thresholds.append(given))

    async with listening(tmp_path / "small"):
        assert (files, thresholds) == ([], [])
    async with listening(tmp_path / "big", nodes=1024, ranks_per_node=8):
        assert (files, thresholds) == ([1024 + 512], [server.COLLECTED])


def test_ranks_of_a_big_gang_whose_reports_wait_longer_are_judged_later() -> None:
    def judged(nodes: int) -> tuple[float, tuple[int, ...]]:
        run = run_of(nodes)
        heard = Rank(ready=True, progress=Progress("Step", step=1, position=5, limit_seconds=1, since=1000.0, heard_at=1000.0))
        late = replace(heard, progress=replace(heard.progress, heard_at=1000.0 - SILENT_SECONDS - 1))
        gang = new_gang(run).with_ranks({0: heard, 1: late}).with_nodes({0: Node(connected=True)})
        [(_, at)] = deadlines(gang, run, [0])
        return round(at - 1000.0 - 1, 6), suspects(gang, 1000.0)

    assert judged(2) == (5.0, (1,))
    assert judged(1024) == (round(progress_seconds(8192), 6), ())


async def test_an_error_of_what_is_decided_later_ends_the_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    made = Coordinator(run_of(2, run_dir=str(tmp_path)), KEY, Output(lambda _: None, tuple, lambda _: None))
    hosting = asyncio.ensure_future(made.run())
    await asyncio.sleep(0)
    monkeypatch.setattr(coordinator, "decide", broken)
    made.connected(0, Untold(), Hello(0, "agent-0", 0, 0))  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(hosting, 20)


def test_agents_that_began_together_tell_their_progress_at_different_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[float]] = []

    async def sleep(seconds: float) -> None:
        taken[-1].append(seconds)
        if len(taken[-1]) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(outbox, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    for node in range(1, 201):
        taken.append([])
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(Outbox(node, 8192, lambda _: None).run())
    pause = progress_seconds(8192)
    assert min(first for first, *_ in taken) < pause / 5 and pause * 0.8 < max(first for first, *_ in taken) <= pause
    assert {wait for _, *others in taken for wait in others} == {pause}


async def test_after_a_time_in_which_the_coordinator_itself_did_not_run_every_agent_has_its_whole_time_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(server, "PAUSED_SECONDS", 0.2)
    async with listening(tmp_path) as scene:
        (await scene.connect(0)).send(message_to_json(Hello(0, "agent-0", 0, 0)))
        await until(lambda: scene.coordinator.gang.nodes[0].connected)
        time.sleep(0.8)  # noqa: ASYNC251 (nothing runs)
        await asyncio.sleep(0.15)  # looked at in the meantime
        assert scene.coordinator.gang.nodes[0].connected


class ClosedChannel:
    """A connection that the coordinator's end closes at once."""

    last_heard = 0.0

    def send(self, message: dict[str, Any]) -> None:
        pass

    async def receive(self) -> dict[str, Any]:
        raise EOFError

    def close(self) -> None:
        pass

    abort = close


def naps(run: Run, monkeypatch: pytest.MonkeyPatch, *, answers: bool, count: int) -> list[float]:
    """How long an agent waits before each of its next tries, while connections close at once, or nobody answers."""
    taken: list[float] = []

    async def connected(*_: Any) -> Any:
        if answers:
            return ClosedChannel()
        raise ConnectionRefusedError

    async def sleep(seconds: float) -> None:
        taken.append(seconds)
        if len(taken) == count:
            raise asyncio.CancelledError

    monkeypatch.setattr(link, "connect", connected)
    monkeypatch.setattr(link, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    made = link.Link(run, KEY, 3, link.Handlers(lambda: Hello(3, "agent", 0, 0), lambda: None, lambda _: None, lambda _: None))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made.run())
    return taken


def test_agents_that_lose_the_coordinator_together_come_back_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = spread_seconds(1024)
    waits = naps(run_of(1024), monkeypatch, answers=True, count=400)
    assert 0 <= min(waits) < spread / 10 and spread * 0.9 < max(waits) <= spread
    assert naps(run_of(2), monkeypatch, answers=True, count=20) == [0.0] * 20


def test_agents_that_nobody_answers_try_again_at_moments_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    least, most = link.RETRY_SECONDS
    waits = naps(run_of(1024), monkeypatch, answers=False, count=40)
    assert least / 2 <= waits[0] <= least
    assert most < max(waits) <= most + spread_seconds(1024)
    assert len(set(waits[-20:])) == 20
    assert max(naps(run_of(2), monkeypatch, answers=False, count=40)) <= most


async def test_an_agent_tells_every_second_that_it_hears_nothing(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(link, "time", clock)
    begun = clock.now
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20):
            await link.watch(cast(Any, SimpleNamespace(last_heard=begun)), 15.0, lambda: told.append(clock.now - begun))
    assert told == pytest.approx([15, 16, 17, 18, 19], abs=0.01)


def test_an_agent_makes_a_silent_connection_anew_after_three_pings_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, aborted = VirtualClock(), asyncio.Event()
    monkeypatch.setattr(link, "time", clock)

    class SilentChannel(ClosedChannel):
        last_heard = clock.now

        async def receive(self) -> dict[str, Any]:
            await aborted.wait()
            raise EOFError

        def abort(self) -> None:
            aborted.set()

    made = link.Link(run_of(2), KEY, 3, link.Handlers(lambda: Hello(3, "agent", 0, 0), lambda: None, lambda _: None, lambda _: None))
    assert clock.seconds_of(made._listen(cast(Any, SilentChannel()))) == pytest.approx(15.0, abs=0.01)


def test_a_coordinator_that_came_more_than_two_seconds_late_judges_no_connection_by_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fifth look comes a second and a half too late, which is no pause, and its tenth three seconds."""
    clock, seen, late = VirtualClock(), list[float](), {4: 1.5, 9: 3.0}
    channel = ClosedChannel()
    channel.last_heard = clock.now

    async def sleep(seconds: float) -> None:
        clock.sleep(seconds + late.get(len(seen), 0.0))
        if len(seen) == 10:
            raise asyncio.CancelledError

    monkeypatch.setattr(server, "time", clock)
    monkeypatch.setattr(server, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    made = server.Server.__new__(server.Server)
    made._proved = {cast(Any, channel): 0}
    made._look_at = lambda node, channel, silent_seconds: seen.append(silent_seconds)  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made._give_up_the_silent())
    assert seen == pytest.approx([1, 2, 3, 4, 6.5, 7.5, 8.5, 9.5, 10.5, 0])


def test_the_connections_of_forty_nodes_are_pinged_two_at_a_time_within_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pinged = VirtualClock(), list[tuple[float, int]]()
    monkeypatch.setattr(channels, "time", clock)
    made = channels.Channels(run_of(40), lambda _: None)
    for node in range(40):
        made.of_node[node] = cast(Any, SimpleNamespace(send=lambda _, node=node: pinged.append((clock.now, node))))
    clock.seconds_of(asyncio.wait_for(made.ping(), 5.1))
    assert {node for _, node in pinged} == set(range(40))
    assert len({now for now, _ in pinged}) == 20 and len(pinged) == 40
