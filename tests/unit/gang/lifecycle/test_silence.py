"""Nodes that are not heard: what is said while it lasts, who is named, and that no rank is blamed; no process, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_gang.contract.messages import Beat, RankExit, RankState, Start, Step, Stopped
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.lifecycle.gang import Gang, Phase, Silence
from lockstep_gang.lifecycle.hang import with_pause
from lockstep_gang.lifecycle.observe import connection_closed, node_heard_again
from lockstep_gang.lifecycle.silences import with_silence
from lockstep_spec.timeouts import Timeouts
from unit.gang.story import Story, hello, started

ADDRESSES = ("x-0.x-headless", "x-1.x-headless")
BROKEN = "what node 0 (x-0) sends doesn't arrive there, so the network between the two is broken, or that machine hangs or is down"
STOPPED = "its machine receives what node 0 (x-0) sends, so its agent is stopped or gets no CPU"
HANG = 76


def training(limit: int = 10) -> Story:
    """Two ranks of the trainer in the same step, each on a node of its own."""
    story = started(training={}, addresses=ADDRESSES, restart=RestartPolicy(3, 10))
    for rank in range(2):
        story.reports(rank, Beat(rank, "Step 4", "backward of micro-batch 1 of 1", 20, limit_seconds=limit))
    return story


def silent(story: Story, node: int = 1, *, since: float = 8.0, arrives: bool = False) -> Story:
    story.gang = with_silence(story.gang, Silence(node, story.now - since, arrives))
    return story.decide()


def given_up(story: Story, node: int = 1) -> Story:
    story.gang = connection_closed(story.gang, node, story.now, unheard=True)
    return story.decide()


def heard(story: Story, node: int = 1) -> Story:
    story.gang = node_heard_again(story.gang, node, story.now)
    return story.decide()


def ended(story: Story, *nodes: int) -> Any:
    """The failure, once these nodes have stopped their ranks."""
    for node in nodes:
        for rank in story.run.ranks_of(node):
            if story.gang.ranks[rank].exit is None:
                story.exits(rank, None, signal="SIGKILL", ordered=True)
        story.hears(node, Stopped(story.gang.attempt))
    return story.gang.failure


@pytest.mark.parametrize(("arrives", "why"), [(False, BROKEN), (True, STOPPED)], ids=["partition", "frozen agent"])
def test_a_node_that_is_not_heard_is_told_while_it_lasts_and_is_lost_then(arrives: bool, why: str) -> None:
    story = silent(training(limit=600).waits(8), arrives=arrives)
    assert story.report.state is State.RUNNING
    assert story.report.message == f"attempt 1 is running; node 1 (x-1) has not been heard since 00:16:40 UTC: {why}"
    given_up(story.waits(23)).waits(6)
    failure = ended(story, 0)
    assert (failure.cause, failure.node, failure.rank) == (Cause.NODE_LOST, 1, None)
    assert failure.message == f"node 1 (x-1) was lost: nothing was heard from it for 30 s, and nobody closed its connection; {why}"


def test_an_end_that_is_heard_after_a_silence_is_an_end() -> None:
    story = silent(training().waits(8)).loses(1).waits(6)
    assert ended(story, 0).message == "node 1 (x-1) was lost: its agent ended or its connection closed, and its ranks with it"


def test_nobody_is_judged_while_a_node_is_not_heard() -> None:
    story = silent(training(limit=10).waits(8)).waits(20)
    assert story.gang.phase is Phase.ACTIVE
    given_up(story).waits(6)
    assert story.gang.phase is Phase.STOPPING
    assert ended(story, 0).cause is Cause.NODE_LOST


def test_once_it_is_heard_again_all_ranks_have_the_time_of_the_silence_once_more() -> None:
    story = heard(silent(training(limit=10).waits(8)).waits(12))
    assert story.gang.phase is Phase.ACTIVE
    assert story.report.message == "attempt 1 is running"
    story.waits(14)
    assert story.gang.phase is Phase.ACTIVE
    story.waits(2)
    assert story.gang.hang is not None


@pytest.mark.parametrize("noticed", ["after the silence is seen", "before"])
def test_a_watchdog_that_ends_its_rank_in_a_silence_blames_nobody(noticed: str) -> None:
    story = training(limit=10)
    if noticed == "before":
        silent(story.waits(6).exits(0, HANG).waits(2))
    else:
        silent(story.waits(8)).waits(4).exits(0, HANG)
    assert story.gang.phase is Phase.STOPPING
    story.hears(0, Stopped(1))
    given_up(story.waits(20))
    failure = story.gang.failure
    assert failure is not None
    assert (failure.cause, failure.node, failure.rank) == (Cause.NODE_LOST, 1, None)
    assert BROKEN in failure.message


def test_where_the_node_is_heard_again_before_the_stop_is_over_the_two_that_could_not_talk_are_named() -> None:
    story = silent(training(limit=10).waits(8)).waits(4).exits(0, HANG)
    failure = ended(heard(story.waits(3)), 0, 1)
    assert (failure.cause, failure.node, failure.rank) == (Cause.FABRIC, 1, None)
    assert failure.message == (
        "node 0 (x-0) and node 1 (x-1) could not talk for 15 s, from 00:16:40 UTC on; meanwhile ranks waited for each other until their time "
        "was up, and none of them is to blame"
    )


def test_a_hang_after_a_silence_that_was_over_is_a_hang() -> None:
    story = heard(silent(training(limit=10).waits(8)).waits(1))
    for rank in range(2):
        story.reports(rank, Beat(rank, "Step 5", "backward of micro-batch 1 of 1", 30, limit_seconds=10))
    story.waits(3).reports(0, Beat(0, "Step 5", "update", 31, limit_seconds=10))
    story.waits(12).waits(5)
    failure = ended(story, 0, 1)
    assert (failure.cause, failure.rank) == (Cause.HANG, 1)


def test_a_script_s_ranks_that_lost_their_peers_in_a_silence_are_not_blamed() -> None:
    story = started(addresses=ADDRESSES, restart=RestartPolicy(3, 10), timeouts=Timeouts(60, 600, 300))
    for rank in range(2):
        story.reports(rank, Step(rank, 3))
    silent(story.waits(8)).waits(2).exits(0, 1, last_lines=("RuntimeError: [gloo] Connection closed by peer",))
    failure = ended(heard(story), 0, 1)
    assert (failure.cause, failure.rank, failure.node) == (Cause.FABRIC, None, 1)


def test_a_coordinator_that_did_not_run_is_what_others_did_not_hear() -> None:
    story = training(limit=600).waits(40)
    story.gang = with_pause(story.gang, 39.0)
    stopped = RankState(1, True, RankExit(1, None, "SIGKILL", ordered=True))
    story.loses(1).hears(1, hello(1, known=1, ranks=(stopped,)))
    failure = ended(story, 0)
    assert (failure.cause, failure.node) == (Cause.NODE_LOST, 0)
    assert failure.message == (
        "the coordinator on node 0 (x-0) did not run for 39 s: its agent was stopped, or its machine froze; node 1 (x-1) heard nothing "
        "and stopped its ranks"
    )


def test_the_log_says_when_a_node_is_not_heard_and_when_it_is_again() -> None:
    story = training().waits(8)
    before: Gang = story.gang
    assert list(log_lines(before, silent(story).gang, story.run)) == [f"node 1 (x-1) has not been heard since 00:16:40 UTC: {BROKEN}"]
    before = story.gang
    assert list(log_lines(before, heard(story.waits(2)).gang, story.run)) == ["node 1 (x-1) is heard again, after 10 s"]
    before = silent(story.waits(8)).gang
    assert "node 1 is gone: nothing is heard of it any more" in log_lines(before, given_up(story).gang, story.run)


def test_the_next_attempt_begins_without_what_was_not_heard_in_the_last() -> None:
    story = given_up(silent(training(limit=600).waits(8)).waits(23)).waits(6)
    ended(story, 0)
    story.hears(1, hello(1, known=1))
    assert any(isinstance(order, Start) for _, order in story.orders)
    assert not story.gang.silences or all(silence.until for silence in story.gang.silences)
