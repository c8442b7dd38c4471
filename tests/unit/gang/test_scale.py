"""A big gang: what a message costs doesn't grow with it, counts are what a look at every rank would say, and nobody is lost by the
coordinator's own delay.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bench.gang_scale import measure
from lockstep_gang.agent.outbox import Outbox, bounded, json_bytes
from lockstep_gang.contract.messages import (
    Activity,
    AgentMessage,
    Beat,
    Error,
    Exited,
    Hello,
    Pace,
    Progressed,
    RankExit,
    RankReport,
    RankState,
    Reported,
    Step,
    message_to_json,
    rank_report_to_json,
)
from lockstep_gang.contract.report import CheckpointReport
from lockstep_gang.contract.run import RestartPolicy, Run
from lockstep_gang.coordinator import channels, coordinator, server
from lockstep_gang.coordinator import reports as reports_module
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.coordinator.reports import report_change
from lockstep_gang.lifecycle.decide import decide
from lockstep_gang.lifecycle.gang import Gang, Node, Nodes, Phase, Ranks, new_gang
from lockstep_gang.lifecycle.hang import deadlines
from lockstep_gang.lifecycle.observe import connection_closed, ended_as_ordered, observe
from unit.gang.cases import KEY, make_run
from unit.gang.served import listening
from unit.gang.test_simulation import Day

MESSAGE_BYTES = 256 * 1024
LINE_BYTES_MAX = 4 * 1024 * 1024
RECONNECT_SECONDS = 5.0
WITH_LINES = 128


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 (the coordinator has no event of it)
        await asyncio.sleep(0.01)


def run_of(nodes: int, **changes: Any) -> Run:
    values: dict[str, Any] = {"ranks_per_node": 8, "gpus_per_node": 8, "restart": RestartPolicy(3, 1), "training": {"played": True}}
    return make_run(nodes=nodes, **values | changes)


class Untold:
    """Where the operator's reports would go."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def taken(gang: Gang, run: Run, message: AgentMessage | None, node: int, now: float) -> Gang:
    """As the coordinator does with each message that comes by itself."""
    before = gang
    gang = observe(gang, run, node, message, now) if message is not None else gang
    for _ in log_lines(before, gang, run):
        pass
    report_change(Untold(), before, gang, run, tuple)  # type: ignore[arg-type]
    while True:
        before, gang = gang, decide(gang, run, now).gang
        for _ in log_lines(before, gang, run):
            pass
        report_change(Untold(), before, gang, run, tuple)  # type: ignore[arg-type]
        if gang.phase is before.phase:
            return gang


def reports(run: Run, node: int, step: int) -> Iterator[RankReport]:
    for rank in run.ranks_of(node):
        yield from (Step(rank, step, 100), Beat(rank, f"Step {step}", "forward", step, 120), Pace(rank, step, 1, 1_000_000))


def progressed(run: Run, node: int, step: int) -> Progressed:
    return Progressed(1, tuple(map(rank_report_to_json, reports(run, node, step))))


def training(run: Run) -> Gang:
    """Every node is here, and every rank trains."""
    gang = new_gang(run)
    for node in range(run.nodes):
        gang = observe(gang, run, node, Hello(node, f"agent-{node}", 0, 0), 1000.0)
    gang = taken(gang, run, None, 0, 1000.0)
    for node in range(run.nodes):
        gang = observe(gang, run, node, progressed(run, node, 1), 1001.0)
    return taken(gang, run, None, 0, 1001.0)


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that this takes: unlike its time, the same on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.collect()  # what other tests have left may have a say when it goes
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def a_step(run: Run, gang: Gang) -> AgentMessage:
    return progressed(run, 7, 2)


def a_first_report(run: Run, gang: Gang) -> AgentMessage:
    return Reported(1, rank_report_to_json(Activity(run.ranks_of(7)[0], "Step")))


def an_ordered_end(run: Run, gang: Gang) -> AgentMessage:
    return Exited(1, RankExit(run.ranks_of(7)[0], None, "SIGKILL", True))


def a_peers_end(run: Run, gang: Gang) -> AgentMessage:
    return Exited(1, RankExit(run.ranks_of(7)[0], 1, None, False, Error(56, "RuntimeError", "connection closed by peer")))


@pytest.mark.parametrize("message", [a_step, a_first_report, an_ordered_end, a_peers_end])
def test_the_work_of_a_message_does_not_grow_with_the_gang(message: Callable[[Run, Gang], AgentMessage]) -> None:
    def work(nodes: int) -> int:
        run = run_of(nodes)
        gang = training(run)
        if message in (an_ordered_end, a_peers_end):  # of the many ends of a stop
            gang = taken(gang, run, Exited(1, RankExit(3, 1, None, False, Error(3, "ValueError", "boom"))), 0, 1002.0)
            assert gang.phase is Phase.STOPPING
        taken(gang, run, message(run, gang), 7, 1002.0)  # what is remembered of types is read now
        return lines_run(lambda: taken(gang, run, message(run, gang), 7, 1002.0))

    assert work(256) == work(16)


def test_a_node_s_state_is_counted_without_a_look_at_all_others() -> None:
    def work(nodes: int) -> int:
        gang = training(run_of(nodes))
        return lines_run(lambda: gang.with_nodes({7: Node()}))

    assert work(64) == work(16)


def test_a_report_is_made_only_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(2)
    before = training(run)
    monkeypatch.setattr(reports_module, "summarize", lambda *_: pytest.fail("a report was made"))
    reporter: Any = Untold()
    for after in (
        replace(before, checkpoint=CheckpointReport(5, "/c/5", "2026-01-01T00:00:00Z")),
        taken_in(before, run, 2),
    ):
        assert after != before
        report_change(reporter, before, after, run, tuple)


def taken_in(gang: Gang, run: Run, step: int) -> Gang:
    return observe(gang, run, 1, progressed(run, 1, step), 1002.0)


async def test_what_came_together_is_decided_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[Gang] = []

    def counted(gang: Gang, run: Run, now: float) -> Any:
        decided.append(gang)
        return decide(gang, run, now)

    monkeypatch.setattr(coordinator, "decide", counted)
    run = run_of(32, run_dir=str(tmp_path))
    made = Coordinator(run, KEY, Output(lambda _: None, tuple, lambda _: None))
    wire: Any = Untold()
    for node in range(run.nodes):
        assert made.connected(node, wire, Hello(node, f"agent-{node}", 0, 0))
    await until(lambda: made.gang.phase is Phase.ACTIVE)
    await asyncio.sleep(0.01)
    decided.clear()
    for node in range(run.nodes):
        made.heard(node, progressed(run, node, 1))
    assert decided == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(decided) == 1
    assert made.gang.ranks.counts.missing == 0


def assert_counted(gang: Gang, run: Run, seen: set[int]) -> None:
    """The counts are those of a look at everything; `seen` collects which ranks were ever judged."""
    nodes, ranks = Nodes(tuple(gang.nodes)), Ranks(tuple(gang.ranks))
    assert (gang.nodes.counts, gang.nodes.away) == (nodes.counts, nodes.away)
    assert (gang.ranks.counts, sorted(gang.ranks.ended)) == (ranks.counts, sorted(ranks.ended))
    if gang.phase is Phase.ACTIVE:
        judged = dict(deadlines(gang, run, range(len(gang.ranks))))
        seen.update(judged)
        assert gang.in_time_until <= min(judged.values(), default=math.inf)


def test_whatever_happens_the_counts_are_those_of_a_look_at_every_rank() -> None:
    seen = set[int]()
    for seed in range(0, 80, 2):  # those of odd seeds wait for a preflight
        a_day(seed, seen)
    assert seen == {0, 1, 2}


def a_day(seed: int, seen: set[int]) -> None:
    day, draw = Day(seed, restarts=3), random.Random(seed + 1000)  # noqa: S311 (no secret)
    for _ in range(150):
        day.step(trouble=draw.random() < 0.5)
        assert_counted(day.gang, day.run, seen)
        node = draw.randrange(day.run.nodes)
        if day.agents[node].connected and day.agents[node].running:
            beat = Beat(node, draw.choice(["Step 1", "Save"]), "", draw.randrange(9), draw.choice([None, 5, 600]))
            told = Progressed(day.agents[node].known, (rank_report_to_json(beat),))
            day.gang = observe(day.gang, day.run, node, told, day.now)
            assert_counted(day.gang, day.run, seen)


def test_ends_that_are_taken_in_together_are_as_those_that_come_one_by_one() -> None:
    run = run_of(4)
    gang = taken(training(run), run, Exited(1, RankExit(3, 1, None, False, Error(3, "ValueError", "boom"))), 0, 1002.0)
    assert gang.phase is Phase.STOPPING
    gang = observe(gang, run, 1, Reported(1, rank_report_to_json(Error(9, "ValueError", "too"))), 1002.0)
    ends = [(rank // 8, Exited(1, RankExit(rank, None, "SIGKILL", True))) for rank in (3, 9, 8, 31, 8, 16)]
    ends += [
        (0, Exited(1, RankExit(17, None, "SIGKILL", True))),
        (2, Exited(2, RankExit(18, None, "SIGKILL", True))),
    ]  # another node's, attempt's
    one_by_one = gang
    for node, message in ends:
        one_by_one = observe(one_by_one, run, node, message, 1002.0)
    together = ended_as_ordered(gang, run, ends)
    assert (together.ranks, together.signs) == (one_by_one.ranks, one_by_one.signs)
    assert (together.ranks.ended, together.ranks.counts) == (one_by_one.ranks.ended, one_by_one.ranks.counts)
    assert set(together.ranks.ended) == {3, 9, 8, 31, 16}


async def test_ends_of_a_stop_are_taken_in_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[AgentMessage] = []

    def counted(gang: Gang, run: Run, node: int, message: AgentMessage, now: float) -> Gang:
        observed.append(message)
        return observe(gang, run, node, message, now)

    monkeypatch.setattr(coordinator, "observe", counted)
    run = run_of(4, run_dir=str(tmp_path))
    made = Coordinator(run, KEY, Output(lambda _: None, tuple, lambda _: None))
    wire: Any = Untold()
    for node in range(run.nodes):
        made.connected(node, wire, Hello(node, f"agent-{node}", 0, 0))
    await until(lambda: made.gang.phase is Phase.ACTIVE)
    for node in range(run.nodes):
        made.heard(node, progressed(run, node, 1))
    made.heard(0, Exited(1, RankExit(0, 1, None, False)))
    await until(lambda: made.gang.phase is Phase.STOPPING and made._recording is None)
    observed.clear()
    for rank in range(1, run.world_size):
        made.heard(run.node_of(rank), Exited(1, RankExit(rank, None, "SIGKILL", True)))
    await until(lambda: len(made.gang.ranks.ended) == run.world_size)
    assert observed == []


def test_only_the_first_of_very_many_ends_are_shown_with_their_last_lines() -> None:
    run = run_of(32)
    before = gang = training(run)
    lines = tuple(f"line {number}" for number in range(20))
    for rank in range(8, run.world_size):  # those of node 0 are in its log
        gang = observe(gang, run, run.node_of(rank), Exited(1, RankExit(rank, 1, None, False, None, lines)), 1002.0)
    told = list(log_lines(before, gang, run))
    assert sum("exited with 1" in line for line in told) == run.world_size - 8
    assert sum(line.endswith("| line 19") for line in told) == WITH_LINES


def test_orders_of_all_nodes_follow_from_what_changed_and_of_one_from_its_own_state() -> None:
    run = run_of(16)
    gang = training(run)
    asked = decide(gang, run, 1002.0)
    assert asked.orders == ()
    again = connection_closed(asked.gang, 5, 1002.0)
    again = observe(again, run, 5, Hello(5, "agent-5", 1, 1, tuple(RankState(rank, True) for rank in run.ranks_of(5))), 1003.0)
    failed = observe(again, run, 2, Exited(1, RankExit(16, 1, None, False)), 1003.0)
    assert {node for node, _ in decide(failed, run, 1003.0).orders} == set(range(16))


async def test_the_time_in_which_the_coordinator_itself_did_not_run_judges_nobody(tmp_path: Path) -> None:
    lines: list[str] = []
    run = run_of(2, run_dir=str(tmp_path))
    made = Coordinator(run, KEY, Output(lines.append, tuple, lines.append))
    hosting = asyncio.ensure_future(made.run())
    await asyncio.sleep(0)  # before it runs it hears no agent
    wires: list[Any] = [Untold(), Untold()]
    for node in (0, 1):
        made.connected(node, wires[node], Hello(node, f"agent-{node}", 0, 0))
    await until(lambda: made.gang.phase is Phase.ACTIVE)
    made.disconnected(1, wires[1])
    await asyncio.sleep(0.01)
    made._clock += RECONNECT_SECONDS + 5  # as if nothing had run for so long
    made.heard(0, progressed(run, 0, 1))
    await asyncio.sleep(0.05)
    assert (made.gang.phase, made.gang.lost) == (Phase.ACTIVE, ())
    made.connected(1, wires[1], Hello(1, "agent-1", 1, 1))
    await asyncio.sleep(0.05)
    assert made.gang.phase is Phase.ACTIVE
    hosting.cancel()
    assert any("did not run for" in line for line in lines)


async def test_any_byte_is_a_sign_of_life_and_silence_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.05)
    async with listening(tmp_path) as scene:
        channels = [await scene.connect(node) for node in (0, 1)]
        for node, channel in enumerate(channels):
            channel.send(message_to_json(Hello(node, f"agent-{node}", 0, 0)))
        await until(lambda: scene.coordinator.gang.nodes.counts.here == 2)
        while scene.coordinator.gang.nodes[1].connected:
            channels[0]._writer.write(b" ")  # a message that isn't whole for long
            await asyncio.sleep(0.02)
        assert scene.coordinator.gang.nodes[0].connected


def endings(ranks: int, character: str) -> tuple[RankState, ...]:
    lines = tuple(f"{number} ".ljust(1000, character) for number in range(20))
    error = Error(0, "ValueError", character * 20_000, lines)
    return tuple(RankState(rank, True, RankExit(rank, 1, None, False, error, lines)) for rank in range(ranks))


@pytest.mark.parametrize("character", ["ä", "😀", '"', "x"])
async def test_a_hello_is_never_longer_than_a_message_may_be(character: str, tmp_path: Path) -> None:
    states = bounded(endings(64, character))
    hello = message_to_json(Hello(0, "agent-0", 1, 0, states))
    assert json_bytes(hello) < LINE_BYTES_MAX * 3 // 4
    assert [state.exit.exit_code for state in states if state.exit is not None] == [1] * 64
    assert all(state.exit is not None and state.exit.last_lines[-1].startswith("19 ") for state in states)
    async with listening(tmp_path, ranks_per_node=64) as scene:
        (await scene.connect(0)).send(hello)
        await until(lambda: scene.coordinator.gang.nodes[0].connected)


def test_a_hello_that_fits_says_everything() -> None:
    states = endings(2, "ä")
    assert bounded(states) == states


async def test_the_first_reports_of_a_nodes_ranks_go_together_and_in_their_order() -> None:
    sent: list[AgentMessage] = []
    outbox = Outbox(3, 512, sent.append)
    outbox.begin_attempt(1)
    for rank in range(24, 32):
        outbox.put(Activity(rank, "Load"), first=True)
        outbox.put(Step(rank, 1))
    outbox.put(Activity(24, "Step"))
    assert sent == []
    await until(lambda: bool(sent))
    (message,) = sent
    assert isinstance(message, Progressed)
    assert len(message.reports) == 16
    assert [(report["event"], report.get("activity")) for report in message.reports if report["rank"] == 24] == [
        ("step", None),
        ("activity", "Step"),
    ]


def test_reports_that_are_too_long_for_one_message_go_in_several() -> None:
    sent: list[AgentMessage] = []
    outbox = Outbox(3, 512, sent.append)
    for rank in range(64):
        outbox.put(Step(rank, 1, metrics={"note": "ä" * 20_000}))
    outbox.flush()
    assert sum(len(message.reports) for message in sent if isinstance(message, Progressed)) == 64
    assert max(json_bytes(message_to_json(message)) for message in sent) < 2 * MESSAGE_BYTES < LINE_BYTES_MAX


def test_a_gang_of_512_ranks_starts_fails_and_starts_again_over_real_connections() -> None:
    figures = measure(64, 8, seconds=1.0)
    assert (figures["ranks"], figures["attempts"], figures["failures"]) == (512, 2, 1)


async def test_pings_come_in_time_though_every_turn_of_the_loop_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "PING_SECONDS", 0.2)
    pinged: list[int] = []

    class Wire:
        def __init__(self, node: int) -> None:
            self.node = node

        def send(self, message: dict[str, Any]) -> None:
            pinged.append(self.node)

    made = channels.Channels(make_run(nodes=40), lambda _: None)
    for node in range(40):
        made.take(node, Wire(node), "agent")  # type: ignore[arg-type]
    pinging = asyncio.ensure_future(made.ping())
    for _ in range(20):
        time.sleep(0.05)  # noqa: ASYNC251 (the loop has much to do)
        await asyncio.sleep(0)
    pinging.cancel()
    assert min(pinged.count(node) for node in range(40)) >= 3  # of 5 in this second
