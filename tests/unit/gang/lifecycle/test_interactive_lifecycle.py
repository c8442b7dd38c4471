"""What is decided in a dev environment: no process, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep_gang.contract.interactive import Asked, Ended, Find, Found, Idleness, Interactive, Interrupted, InUse
from lockstep_gang.contract.messages import Leaving, Start, Started, Step, Stop, StopMode, Stopped
from lockstep_gang.contract.report import State
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.lifecycle.gang import Phase
from lockstep_gang.lifecycle.history import AttemptRecord, resume_gang
from unit.gang.cases import make_run
from unit.gang.story import Story, hello

RUN = make_run(command=(), interactive=Interactive(idle_seconds=600, warn_seconds=300))
ASKED = Asked("1", ("a.py", "--epochs", "3"), "/workspace", "ada on node 0")


def environment(**changes: Any) -> Story:
    """Both nodes are here, and nothing was asked for."""
    return Story(replace(RUN, **changes)).hears(0, hello(0)).hears(1, hello(1))


def running(asked: Asked = ASKED) -> Story:
    story = environment().hears(0, asked)
    return story.hears(0, Found(asked.id)).hears(1, Found(asked.id)).hears(0, Started(1)).hears(1, Started(1))


def answers(story: Story) -> list[tuple[int, Ended]]:
    return [(node, order) for node, order in story.orders if isinstance(order, Ended)]


def stopped(story: Story) -> Story:
    for node in (0, 1):
        story.hears(node, Stopped(story.gang.attempt))
    return story


def test_nodes_that_are_here_wait_until_something_is_asked_for() -> None:
    story = environment().waits(100_000)
    assert (story.gang.phase, story.records, story.report.message) == (Phase.WAITING, [], "ready: nothing runs")
    assert story.report.interactive.ready


def test_a_node_that_never_comes_fails_nothing_and_is_named() -> None:
    story = Story(RUN).hears(0, hello(0)).waits(100_000)
    assert story.report.state is State.WAITING
    assert story.report.message == "waiting for node 1 of 2"
    assert not story.report.interactive.ready


def test_every_node_is_asked_for_the_script_then_all_start_it() -> None:
    story = environment().hears(0, ASKED)
    assert story.orders == [(node, Find("1", ASKED.command, "/workspace")) for node in (0, 1)]
    story.hears(0, Found("1"))
    assert story.records == []
    story.hears(1, Found("1"))
    assert story.records == ["begin"]
    assert [(node, order.run) for node, order in story.orders if isinstance(order, Start)] == [(0, ASKED), (1, ASKED)]


def test_a_script_that_a_node_lacks_starts_nothing() -> None:
    story = environment().hears(0, ASKED, Found("1")).hears(1, Found("1", "node 1 has no a.py"))
    assert answers(story) == [(0, Ended("1", 78, "node 1 has no a.py"))]
    assert story.records == []


def test_a_node_that_does_not_answer_is_named_in_time() -> None:
    story = environment().hears(0, ASKED, Found("1"))
    assert story.wake_at == story.now + 15
    assert answers(story.waits(15)) == [(0, Ended("1", 78, "node 1 did not say within 15 s whether it has a.py"))]


def test_another_version_of_the_script_is_told_of() -> None:
    story = environment().hears(0, ASKED, Found("1", digest="x"))
    before = story.gang
    story.hears(1, Found("1", digest="y"))
    assert any("a.py on node 1 is not the same as on node 0" in line for line in log_lines(before, story.gang, RUN))


def test_the_end_is_told_to_whoever_asked_and_the_next_run_can_start() -> None:
    story = stopped(running().exits(0).exits(1))
    assert story.records == ["begin", "Complete"]
    assert story.gang.session.last == Ended("1", 0, "a.py --epochs 3 is done after 0 s")
    story.hears(1, replace(ASKED, id="2")).hears(0, Found("2")).hears(1, Found("2"))
    assert story.gang.attempt == 2


@pytest.mark.parametrize(("exit_", "code"), [({"code": 3}, 3), ({"code": None, "signal": "SIGSEGV"}, 139)])
def test_a_failure_ends_the_run_with_its_code_and_costs_the_job_nothing(exit_: dict[str, Any], code: int) -> None:
    story = stopped(running().exits(1, **exit_))
    assert story.gang.session.last.exit_code == code
    assert story.gang.session.last.message.startswith("a.py --epochs 3 failed: rank 1 on node 1")
    assert (story.gang.phase, story.gang.budget.failures, story.gang.history, story.report.state) == (Phase.WAITING, 0, (), State.WAITING)
    assert story.waits(1000).records == ["begin", "Failed"]


def test_an_interrupt_lets_ranks_save_and_a_second_one_kills() -> None:
    story = running().hears(0, Interrupted("1", "Ctrl-C"))
    assert {order.mode for _, order in story.orders if isinstance(order, Stop)} == {StopMode.SAVE}
    story.hears(0, Interrupted("1", "Ctrl-C"))
    assert {order.mode for _, order in story.orders if isinstance(order, Stop)} == {StopMode.KILL}
    stopped(story)
    assert story.gang.session.last == Ended("1", 130, "a.py --epochs 3 was stopped: Ctrl-C")
    assert story.records == ["begin", "Stopped"]


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_script_that_exits_with_0_after_an_interrupt_is_stopped_and_one_that_had_ended_before_is_done(interrupts: int) -> None:
    for ordered, last in (
        (True, Ended("1", 130, "a.py --epochs 3 was stopped: Ctrl-C")),
        (False, Ended("1", 0, "a.py --epochs 3 is done after 0 s")),
    ):
        story = running().hears(0, *[Interrupted("1", "Ctrl-C")] * interrupts)
        stopped(story.exits(0, ordered=ordered).exits(1, ordered=ordered))
        assert story.gang.session.last == last


def test_an_interrupt_while_a_node_is_waited_for_ends_the_wait() -> None:
    story = Story(RUN).hears(0, hello(0), ASKED, Interrupted("1", "Ctrl-C"))
    assert answers(story) == [(0, Ended("1", 130, "stopped before it started: Ctrl-C"))]


def test_a_second_request_is_refused_with_who_runs_what() -> None:
    story = running().hears(1, replace(ASKED, id="2", by="bob on node 1"))
    ((node, refused),) = answers(story)
    assert (node, refused.id, refused.exit_code) == (1, "2", 1)
    assert "a.py --epochs 3 runs since" in refused.message
    assert "ada on node 0" in refused.message


def test_whoever_lost_the_connection_hears_the_end_when_they_ask_again() -> None:
    story = running().exits(0).loses(0).exits(1)
    story.hears(0, hello(0), replace(ASKED, again=True))
    assert answers(story) == [(0, Ended("1", 0, "a.py --epochs 3 is done after 0 s"))]


def test_a_run_of_an_earlier_coordinator_is_told_to_be_over() -> None:
    story = environment().hears(0, replace(ASKED, again=True))
    assert answers(story) == [(0, Ended("1", 1, "node 0's agent restarted, which ended the run"))]


def test_whoever_does_not_wait_hears_that_it_started_and_no_more() -> None:
    detached = replace(ASKED, detached=True)
    story = environment().hears(0, detached, Found("1")).hears(1, Found("1"))
    assert answers(story) == [(0, Ended("1", 0, "a.py --epochs 3 runs as attempt 1; its output is in the log of node 0"))]
    story.exits(0).exits(1)
    assert answers(story) == []


def test_a_lost_node_ends_the_run() -> None:
    story = running().loses(1).waits(5)
    story.hears(0, Stopped(1))
    assert "node 1 was lost" in story.gang.session.last.message


def test_a_rank_that_stands_still_is_left_to_whoever_watches() -> None:
    story = running().reports(0, Step(0, 1)).waits(1_000_000)
    assert story.gang.phase is Phase.ACTIVE


def test_a_suspension_stops_the_run_and_says_so() -> None:
    story = running().hears(0, Leaving())
    stopped(story.hears(1, Leaving()))
    assert story.gang.stopped is not None
    assert story.gang.session.last == Ended("1", 75, "a.py --epochs 3 was stopped: a node was asked to stop")


def test_idleness_warns_then_is_over_and_a_run_is_use() -> None:
    story = environment().waits(299)
    assert story.gang.session.idleness is Idleness.NONE
    assert story.wake_at == story.now + 1
    story.waits(1)
    assert (story.gang.session.idleness, story.report.interactive.release) == (Idleness.WARNED, "1970-01-01T00:26:40Z")
    assert story.waits(300).gang.session.idleness is Idleness.OVER
    busy = running().waits(100_000)
    assert busy.gang.session.idleness is Idleness.NONE
    stopped(busy.exits(0).exits(1)).waits(299)
    assert busy.gang.session.idleness is Idleness.NONE
    assert busy.waits(1).gang.session.idleness is Idleness.WARNED


def test_work_in_a_shell_is_use() -> None:
    story = environment().waits(400).hears(1, InUse()).waits(200)
    assert story.gang.session.idleness is Idleness.NONE
    assert environment(interactive=Interactive(0, 0)).waits(1_000_000).gang.session.idleness is Idleness.NONE


def test_nothing_starts_while_the_gpus_are_being_released() -> None:
    story = environment().waits(600).hears(0, ASKED)
    assert "lockstep resume x" in answers(story)[0][1].message
    story.waits(31).hears(0, replace(ASKED, id="2"))
    assert story.gang.session.request is not None  # nobody released them: there is no operator at the moment


def test_a_coordinator_that_is_started_again_waits_for_the_next_request() -> None:
    gang = resume_gang(RUN, [AttemptRecord(4, "uid-1", 0, "2026-01-01T00:00:00Z")], None, 1000.0)
    assert (gang.phase, gang.failure, gang.not_before, gang.attempt) == (Phase.WAITING, None, 0.0, 4)
