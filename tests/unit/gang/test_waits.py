"""A gang's ends that wait for each other, for a name server or for a volume: each goes on after the time that is promised."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_gang.agent import agent, interactive, link
from lockstep_gang.agent.agent import Agent
from lockstep_gang.agent.log import Console
from lockstep_gang.agent.outbox import Outbox
from lockstep_gang.agent.preflight import answers, files, network, programs
from lockstep_gang.agent.preflight.answers import NodePreflight
from lockstep_gang.agent.ranks import fabric, processes, progress_server, relay
from lockstep_gang.agent.ranks.nccl_log import NcclLogs
from lockstep_gang.agent.ranks.ranks import LocalNode
from lockstep_gang.contract import channel
from lockstep_gang.contract import lines as contract_lines
from lockstep_gang.contract.messages import Activity, Step
from lockstep_gang.contract.trouble import Trouble, TroubleKind
from lockstep_gang.coordinator import channels, coordinator, reporter, reports, server
from lockstep_gang.coordinator import network as names
from lockstep_gang.coordinator.coordinator import Coordinator
from lockstep_gang.coordinator.reporter import Reporter
from lockstep_spec.choices import StorageMode
from unit.gang.cases import KEY, make_run
from unit.virtual_time import VirtualClock, clock_of, forever

RUN = make_run(nodes=2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return clock_of(monkeypatch, contract_lines, link, files, network, processes, relay, channels, reports, reporter, server)


async def unresolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", forever, raising=False)
    await names.resolved("node-0", 1)


async def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "connect", forever)
    assert await network.why_unreachable(RUN, KEY, 0, 1, 1) == "no answer in 5 s"


async def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_open", forever)
    await channel.connect(("node-0", 1), KEY, "uid-1", 0)


async def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(_: object) -> Any:
        return None, SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(channel, "_open", opened)
    monkeypatch.setattr(channel, "_prove", forever)
    await channel.connect(("node-0", 1), KEY, "uid-1", 0)


async def unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    made = server.Server.__new__(server.Server)
    made._run, made._key, made._refusals = RUN, KEY, cast(Any, None)
    monkeypatch.setattr(server, "accept", forever)
    await made._connection(cast(Any, None), cast(Any, SimpleNamespace(get_extra_info=lambda _: None, close=lambda: None)))


async def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    made = programs.NodeSelfTest.__new__(programs.NodeSelfTest)
    made._run, made._node, made._programs = RUN, 0, cast(Any, SimpleNamespace(kill=lambda: None))
    made._running, made._result, made._text = asyncio.ensure_future(forever()), None, bytearray()
    monkeypatch.setattr(made, "begin", lambda: None)
    monkeypatch.setattr(programs, "read_result", lambda *_: None)
    monkeypatch.setattr(programs, "is_clean", lambda _: False)
    await made.result(60, anew=False)


async def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(parts: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        return {name: part() for name, part in parts.items()}

    monkeypatch.setattr(answers, "_all_in_time", at_once)
    await NodePreflight(make_run(storage=StorageMode.SHARED), KEY, 1, lambda answer: None)._sees_marker("token")


async def uncopied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an agent whose copies of NCCL's logs hang."""
    with tempfile.TemporaryDirectory(prefix="lockstep-", dir="/tmp") as folder:
        made = Agent(RUN, KEY, LocalNode(RUN, 1, "run.json", Path(folder, "report.sock"), Path(folder)), Console(1))
        logs = NcclLogs(Path(folder), 1, lambda *_: None)
        logs._keeping = cast(Any, SimpleNamespace(join=link.time.sleep))
        made._ranks = cast(Any, SimpleNamespace(nccl=logs, kill=lambda: None, attempt=0, leaders={}, left=list, exits=list))
        made._done.set()
        monkeypatch.setattr(agent, "become_subreaper", lambda: None)
        monkeypatch.setattr(made.link, "run", forever)
        await made.run()


async def untidied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a preflight on a volume that hangs."""
    thread = SimpleNamespace(start=lambda: None, join=link.time.sleep)
    monkeypatch.setattr(answers, "threading", SimpleNamespace(Thread=lambda **_: thread))
    made = NodePreflight(RUN, KEY, 1, lambda answer: None)
    made._round = 1
    made.end()


async def cut_off(tmp: Path) -> None:
    (tmp / "last").touch()
    await link.CutOff(lambda: Trouble(TroubleKind.DNS, "x"), tmp / "last", tmp).wait()


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (unresolved, 4.0),
        (refused, 5.0),
        (unopened, 10.0),
        (unproved, 10.0),
        (unheard, 10.0),
        (untested, 65.0),
        (unmarked, 3.0),
        (uncopied, 3.0),
        (untidied, 1.0),
    ],
)  # fmt: skip
def test_what_never_answers_is_waited_for_so_long(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, work: Callable[[pytest.MonkeyPatch], Coroutine[Any, Any, None]], seconds: float
) -> None:
    assert clock.seconds_of(work(monkeypatch)) == pytest.approx(seconds, abs=0.3)


def test_trouble_that_lasts_for_six_seconds_leaves_last_words(clock: VirtualClock, tmp_path: Path) -> None:
    assert clock.seconds_of(cut_off(tmp_path)) == pytest.approx(6.5, abs=0.6)


@pytest.mark.parametrize(
    ("wait", "seconds", "looks"),
    [(lambda count: network.unresolved(["node-0"]), 5.0, 27), (lambda count: files.sees(Path("/nowhere"), "t", 3.0), 3.0, 32)],
)  # fmt: skip
def test_names_and_marks_that_never_come_are_looked_for_often_and_given_up(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, wait: Callable[[list[int]], object], seconds: float, looks: int
) -> None:
    count: list[int] = []
    monkeypatch.setattr(network, "_why_unresolved", lambda address: count.append(1) or "no such name")
    monkeypatch.setattr(files, "read_regular", lambda *_: count.append(1) or b"")
    begun = clock.now
    wait(count)
    assert clock.now - begun == pytest.approx(seconds, abs=0.25) and looks - 3 <= len(count) <= looks


async def fabric_watched(told: Callable[[], None]) -> None:
    made = fabric.FabricReporter.__new__(fabric.FabricReporter)
    made.tell = lambda ranks: told()  # type: ignore[method-assign]
    await made.watch(lambda: None)


async def missing_said(told: Callable[[], None]) -> None:
    made = Coordinator.__new__(Coordinator)
    made._run, made._now, made.gang = RUN, lambda: 0.0, cast(Any, None)  # type: ignore[method-assign]
    made._say = lambda text: told()  # type: ignore[method-assign, assignment]
    await made._say_what_is_missing()


async def watched_for_use(told: Callable[[], None]) -> None:
    made = interactive.DevNode.__new__(interactive.DevNode)
    made._node = cast(Any, SimpleNamespace(run=SimpleNamespace(interactive=SimpleNamespace(idle_seconds=None))))
    made._link = cast(Any, SimpleNamespace(send=lambda message: told()))
    await made._watch()


async def outboxed(told: Callable[[], None]) -> None:
    box = Outbox(0, 2, lambda message: told())
    async with asyncio.TaskGroup() as both:
        both.create_task(box.run())
        while True:
            box.put(Step(0, 1))
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("work", "often"),
    [(fabric_watched, (19, 21)), (missing_said, (1, 2)), (watched_for_use, (1, 1)), (outboxed, (35, 41))],
)  # fmt: skip
async def test_so_often_is_it_done_within_twenty_seconds(
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Callable[[], None]], Coroutine[Any, Any, None]],
    often: tuple[int, int],
) -> None:
    told: list[float] = []
    monkeypatch.setattr(coordinator, "waits_for", lambda *_: True)
    monkeypatch.setattr(coordinator, "message_of", lambda *_: "waiting")
    monkeypatch.setattr(interactive, "ShellActivity", lambda: SimpleNamespace(was_used=lambda now: True))
    with suppress(TimeoutError):
        async with asyncio.timeout(20.05):
            await work(lambda: told.append(clock.now))
    assert often[0] <= len(told) <= often[1]


async def test_what_a_rank_is_at_is_sent_within_a_fifth_of_a_second(clock: VirtualClock) -> None:
    sent: list[float] = []
    Outbox(1, 2, lambda message: sent.append(clock.now - 1000.0)).put(Activity(1, "load"))
    await asyncio.sleep(1)
    assert sent == pytest.approx([0.2], abs=0.01)


@pytest.mark.parametrize(("offer", "seconds"), [("", 15.0), ("ask", 5.0), ("news", 1.0)])
async def test_the_next_report_is_due_after_so_long(clock: VirtualClock, offer: str, seconds: float) -> None:
    made = Reporter(cast(Any, SimpleNamespace(url="https://x")), KEY, lambda reply: None, lambda line: None)
    made._told_at = clock.now
    if offer:
        {"ask": partial(made.ask, True), "news": partial(made.news, lambda: cast(Any, None))}[offer]()
    assert made._due() - clock.now == seconds


@pytest.mark.parametrize(("is_news", "seconds"), [(True, 1.0), (False, 5.0)])
async def test_the_file_of_a_report_is_written_again_after_so_long(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, is_news: bool, seconds: float
) -> None:
    written: list[float] = []

    async def in_thread(*_: object) -> None:
        written.append(clock.now)

    monkeypatch.setattr(reports, "in_thread", in_thread)
    monkeypatch.setattr(reports, "report_file_text", lambda *_: "")
    monkeypatch.setattr(reports, "replace", lambda report, **_: report)
    made = reports.ReportFile(cast(Any, SimpleNamespace(write_report=lambda text: None)), lambda line: None)
    running = asyncio.ensure_future(made.run())
    made.transition(cast(Any, None))
    await asyncio.sleep(0.01)
    (made.news if is_news else made.refresh)(lambda: cast(Any, None))
    await asyncio.sleep(8)
    running.cancel()
    assert written[1] - written[0] == pytest.approx(seconds, abs=0.1)


def test_a_line_that_a_script_writes_over_is_passed_on_every_ten_seconds(clock: VirtualClock) -> None:
    lines: list[str] = []
    made = relay.Relay(0, lines.append)
    for number in range(25):
        made.feed(b"step %d\r" % number)
        clock.sleep(1.0)
    assert len(lines) == 3


def test_a_script_that_does_not_end_its_report_has_five_seconds(clock: VirtualClock) -> None:
    made = progress_server.ProgressServer.__new__(progress_server.ProgressServer)
    made._request = forever  # type: ignore[method-assign]
    writer: Any = SimpleNamespace(close=lambda: None, wait_closed=partial(asyncio.sleep, 0))
    assert clock.seconds_of(made._serve(cast(Any, None), writer)) == 5.0


def test_an_agent_that_reaches_nobody_tries_sixty_times_eagerly_and_says_so_every_ten_seconds(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, said = list[float](), list[float]()

    async def refuse(*_: object) -> None:
        tries.append(clock.now)
        raise ConnectionRefusedError

    monkeypatch.setattr(link, "resolved", refuse)
    monkeypatch.setattr(link.random, "uniform", lambda least, most: most)
    nothing: Any = lambda *_: None  # noqa: E731
    made = link.Link(RUN, KEY, 1, link.Handlers(nothing, nothing, nothing, lambda line: said.append(clock.now - 1000.0)))
    clock.seconds_of(asyncio.wait_for(made.run(), 35.0))
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses[:66] == pytest.approx([0.1] * 61 + [0.2, 0.4, 0.8, 1.0, 1.0])
    assert said == pytest.approx([10, 20, 30], abs=1.0)


@pytest.mark.parametrize(("late", "seconds"), [(1.9, 10.0), (2.1, 13.1)])
def test_after_a_pause_of_more_than_two_seconds_the_silence_begins_anew(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, late: float, seconds: float
) -> None:
    pauses, begun = iter([late]), clock.now

    async def sleep(seconds: float) -> None:
        clock.sleep(seconds + next(pauses, 0.0))

    def unheard() -> None:
        raise EOFError

    monkeypatch.setattr(link, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(EOFError):
        asyncio.run(link.watch(cast(Any, SimpleNamespace(last_heard=0.0)), 10.0, unheard))
    assert clock.now - begun == pytest.approx(seconds)


def test_a_node_is_reported_after_seven_and_a_half_seconds_of_silence_and_given_up_after_thirty(clock: VirtualClock) -> None:
    said: list[tuple[str, float]] = []
    transport = SimpleNamespace(abort=lambda: said.append(("given up", clock.now - 1000.0)))
    silent = channel.Channel.__new__(channel.Channel)
    silent._reader, silent._writer = cast(Any, SimpleNamespace(last_heard=clock.now)), cast(Any, SimpleNamespace(transport=transport))
    made = server.Server.__new__(server.Server)
    made._proved, made._unheard = {silent: 1}, set()
    made._coordinator = cast(Any, SimpleNamespace(unheard=lambda *_: said.append(("unheard", clock.now - 1000.0))))
    clock.seconds_of(asyncio.wait_for(made._give_up_the_silent(), 31.5))
    assert said == [("unheard", 8.0), ("given up", 31.0)]


def agent_of(ranks: object) -> Agent:
    """An agent whose ranks run."""
    made = Agent.__new__(Agent)
    made._run, made._running, made._known_attempt, made._ranks = RUN, True, 1, cast(Any, ranks)
    made._survivors = cast(Any, SimpleNamespace(killed=lambda ranks: None))
    return made


async def test_ranks_have_three_seconds_for_their_stacks_and_what_is_left_of_them_is_looked_for_every_second(clock: VirtualClock) -> None:
    killed, looks = list[float](), list[float]()
    asked = SimpleNamespace(ask_for_stacks=lambda: None, dumps=list, kill=lambda: killed.append(clock.now - 1000.0))
    ended = SimpleNamespace(
        leaders={}, look_for_children=lambda: None, finish=lambda: None, left=lambda: not looks.append(clock.now - 1000.0)
    )
    agent_of(asked)._dump()
    agent_of(ended)._finish_attempt()
    await asyncio.sleep(3.5)
    assert killed == pytest.approx([3]) and looks == pytest.approx([0, 1, 2, 3])


def test_a_process_between_two_programs_is_looked_at_for_a_tenth_of_a_second(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_has_been_seen", lambda *_: False)
    begun = clock.now
    processes.kill_strays("NAME=value")
    assert clock.now - begun == pytest.approx(0.1)


def test_refused_connections_are_told_of_once_a_second(clock: VirtualClock) -> None:
    said: list[str] = []
    refusals = contract_lines.Refusals(said.append)
    for _ in range(16):
        refusals.add("refused")
        clock.sleep(0.125)
    assert said == ["refused", "refused (and 7 others since the last such line)"]
