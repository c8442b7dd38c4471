"""How long a coordinator waits for its volume, for other nodes and for itself, and how much it keeps for a reader that doesn't take it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_gang.contract.interactive import Asked
from lockstep_gang.contract.report import CheckpointReport
from lockstep_gang.contract.run import ReportTarget
from lockstep_gang.coordinator import channels, coordinator, https_post, reporter, reports
from lockstep_gang.coordinator.channels import RunOutput
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.https_post import Answer, Sender
from lockstep_gang.coordinator.ledger import GoodputAccount
from lockstep_gang.coordinator.records import Records
from lockstep_gang.coordinator.reporter import Reporter
from lockstep_gang.lifecycle.gang import Node, Phase, Request, new_gang
from lockstep_gang.lifecycle.summary import summarize
from unit.gang.cases import KEY, make_run
from unit.gang.story import hello
from unit.gang.test_scale import Untold
from unit.virtual_time import VirtualClock, clock_of

TARGET = ReportTarget("https://operator:8443/reports", ca_pem="", token_file="/dev/null")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = clock_of(monkeypatch, channels, coordinator, reports, reporter, now=0.0)
    for module in (coordinator, reports):
        monkeypatch.setattr(module, "in_thread", at_once)
    monkeypatch.setattr(coordinator, "seconds_since_boot", clock.monotonic)
    monkeypatch.setattr(coordinator, "slept_seconds", lambda: 0.0)
    return clock


def at_once(work: Callable[[], None], name: str) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        future.set_result(work())
    except OSError as error:
        future.set_exception(error)
    return future


def made(folder: Path, say: Callable[[str], None] = lambda line: None) -> Coordinator:
    return Coordinator(make_run(run_dir=str(folder)), KEY, Output(say, tuple, say))


async def hosted(both_here: Coordinator, seconds: float) -> None:
    """So long of a coordinator whose two nodes come at its beginning."""
    hosting = asyncio.ensure_future(both_here.run())
    await asyncio.sleep(0)  # before it runs it hears no agent
    for node in (0, 1):
        both_here.connected(node, cast(Any, Untold()), hello(node))
    await asyncio.sleep(seconds)
    hosting.cancel()


async def test_a_write_that_has_not_ended_after_five_seconds_is_reported(
    clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[float, str]] = []
    monkeypatch.setattr(coordinator, "in_thread", lambda *_: asyncio.get_running_loop().create_future())
    await hosted(made(tmp_path, lambda line: lines.append((clock.now, line))), 9.0)
    assert [round(at) for at, line in lines if "the job's record was not written within 5 s" in line] == [5]


async def test_a_write_that_failed_is_tried_again_every_ten_seconds(
    clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def fail(*_: object) -> None:
        tries.append(clock.now)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Records, "write_attempts", fail)
    await hosted(made(tmp_path), 25.0)
    assert tries == pytest.approx([0, 10, 20], abs=0.01)


@pytest.mark.parametrize(("commits_every", "written"), [(0.1, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (1000.0, [15, 30, 45])])
async def test_the_account_is_written_every_15_s_and_a_second_after_the_last_time_if_there_is_a_commit(
    clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits_every: float, written: list[float]
) -> None:
    times: list[float] = []
    monkeypatch.setattr(GoodputAccount, "keep", lambda *_: times.append(clock.now))
    busy = made(tmp_path)
    keeping = asyncio.ensure_future(busy._keep_account())
    for step in range(1000):
        await asyncio.sleep(commits_every)
        busy._be(replace(busy.gang, checkpoint=CheckpointReport(step, "/c", "2026-01-01T00:00:00Z")))
        if clock.now > 50:
            break
    keeping.cancel()
    assert times[: len(written)] == pytest.approx(written, abs=0.5)


async def test_the_file_of_a_report_that_is_no_news_is_written_every_five_seconds(
    clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []
    monkeypatch.setattr(Records, "write_report", lambda *_: times.append(clock.now))
    quiet = made(tmp_path)
    hosting = asyncio.ensure_future(quiet.run())
    for _ in range(33):
        await asyncio.sleep(0.5)
        quiet._reports.refresh(lambda: summarize(quiet.gang, make_run()))
    hosting.cancel()
    assert times == pytest.approx([0, 5, 10, 15], abs=0.6)


@pytest.mark.parametrize(("late", "longer"), [(0.2, 0.0), (0.3, 0.3)])
async def test_nodes_that_are_away_have_longer_to_come_back_if_a_pulse_is_a_quarter_of_a_second_late(
    clock: VirtualClock, tmp_path: Path, late: float, longer: float
) -> None:
    busy = made(tmp_path)
    busy.gang = busy.gang.with_nodes({1: Node(instance="agent-1", closed_at=0.0)})
    clock.sleep(1.0 + late)
    busy.connected(0, cast(Any, Untold()), hello(0))
    assert busy.gang.nodes[1].closed_at == pytest.approx(longer)


@pytest.mark.parametrize(
    ("late", "told"), [(1.9, []), (2.1, ["the coordinator did not run for 2 s; that time counts against no rank or node"])]
)
async def test_a_pulse_more_than_two_seconds_late_is_logged(clock: VirtualClock, tmp_path: Path, late: float, told: list[str]) -> None:
    lines: list[str] = []
    slow = made(tmp_path, lines.append)
    clock.sleep(1.0 + late)
    slow.connected(0, cast(Any, Untold()), hello(0))
    assert [line for line in lines if "did not run" in line] == told


async def test_at_its_end_a_coordinator_waits_five_seconds_for_a_node_and_five_for_its_last_report(
    clock: VirtualClock, tmp_path: Path
) -> None:
    ended = made(tmp_path)
    ended.gang = replace(ended.gang, phase=Phase.ENDED)
    await ended.settle()
    assert clock.now == pytest.approx(10.0)


async def test_of_a_hundred_transitions_while_the_operator_is_away_the_last_64_are_delivered(clock: VirtualClock) -> None:
    delivered: list[int] = []

    async def take(report: Any) -> Answer:
        delivered.append(report.attempt)
        return Answer(200, b"{}")

    run = make_run()
    back = Reporter(TARGET, KEY, lambda reply: None, lambda line: None)
    back._post = take  # type: ignore[method-assign, assignment]
    for number in range(100):
        back.transition(replace(summarize(new_gang(run), run), attempt=number))
    delivering = asyncio.ensure_future(back.run())
    await back.flush(1.0)
    delivering.cancel()
    assert delivered == list(range(36, 100))


def test_of_an_answer_of_the_operator_one_mebibyte_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    endless = SimpleNamespace(status=200, headers={}, sock=None, request=lambda *_, **__: None, read=bytes, isclosed=lambda: False)
    endless.close = lambda: closed.append("closed")  # the rest would be taken for the next answer
    endless.getresponse = lambda: endless
    monkeypatch.setattr(https_post.ssl, "create_default_context", lambda **_: None)
    monkeypatch.setattr(https_post.http.client, "HTTPSConnection", lambda *_, **__: endless)
    assert len(Sender(TARGET, KEY).post(make_run().job, b"{}").body) == 1024 * 1024
    assert closed == ["closed"]


@pytest.mark.parametrize(("backlog", "sent"), [(8 << 20, 1), ((8 << 20) + 1, 0)])
def test_a_reader_of_a_run_that_has_not_taken_eight_mebibytes_gets_no_more_lines(backlog: int, sent: int) -> None:
    messages: list[dict[str, Any]] = []
    channel = cast(Any, SimpleNamespace(backlog_bytes=backlog, send=messages.append))
    request = Request(Asked("1", ("a.py",), "/workspace", "ada on node 0"), 0, "agent-0", 0.0)
    RunOutput({0: channel}).show(request, ("step 1",))
    assert len(messages) == sent
