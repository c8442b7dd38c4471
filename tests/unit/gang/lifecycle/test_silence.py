"""Nodes that are not heard: what is said while it lasts, who is named, and that no rank is blamed; no process, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_gang.contract.messages import Beat, Dumped, RankExit, RankState, Start, Step, Stopped, rank_report_to_json
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.lifecycle.gang import Gang, Phase, Silence
from lockstep_gang.lifecycle.hang import with_pause
from lockstep_gang.lifecycle.observe import connection_closed, node_heard_again
from lockstep_gang.lifecycle.silences import with_silence
from lockstep_spec.choices import Timeouts
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
    assert (failure.cause, failure.node, failure.rank) == (Cause.NODE_LOST, 1, None)
    assert BROKEN in failure.message


def test_where_the_node_is_heard_again_before_the_stop_is_over_the_two_that_could_not_talk_are_named() -> None:
    story = silent(training(limit=10).waits(8)).waits(4).exits(0, HANG)
    failure = ended(heard(story.waits(3)), 0, 1)
    assert (failure.cause, failure.node, failure.rank) == (Cause.FABRIC, 1, None)
    assert (
        failure.message
        == "node 0 (x-0) and node 1 (x-1) could not talk for 15 s, from 00:16:40 UTC on; ranks waited for each other until their time was"
        " up, and none of them is to blame: connections between them may be dead since then, as where a firewall forgets connections:"
        " pods of one job must reach each other on all ports: look at network policies and firewalls"
    )


def test_a_hang_after_a_silence_that_was_over_is_a_hang() -> None:
    story = heard(silent(training(limit=10).waits(8)).waits(1)).waits(1)
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


IN_A_COLLECTIVE = {"state": "S", "at": "step (a.py:3)", "waits_for_others": True}
BUSY = {"state": "R", "at": "read (data.py:9)"}
NAMED = "node 0 (x-0) and node 1 (x-1)"


def scripted() -> Story:
    """Two ranks of a script, of which the second has come further than was heard."""
    story = started(addresses=ADDRESSES, restart=RestartPolicy(3, 10), timeouts=Timeouts(step_seconds=60))
    story.reports(1, Step(1, 12))
    return story.waits(3).reports(0, Step(0, 16))


def again(story: Story, noticed: str, step: int = 16) -> Story:
    """The gang after the connection of node 1 was made anew, which both sides, the other one, or this one alone had noticed."""
    if noticed == "silence":
        silent(story.waits(8)).waits(4)
    elif noticed == "closed":
        story.loses(1).waits(1)
    told = rank_report_to_json(Step(1, step))
    return story.hears(1, hello(1, attempt=1, ranks=(RankState(1, True, progress=(told,)),)))


def hung(story: Story, *seen: dict[str, Any]) -> Any:
    story.waits(70)
    for rank, each in enumerate(seen):
        story.hears(rank, Dumped(1, rank, **each))
    return ended(story, 0, 1)


@pytest.mark.parametrize(
    ("noticed", "how"),
    [
        ("silence", "could not talk for 12 s, from 00:16:43 UTC on"),
        ("closed", "could not talk for 1 s, from 00:16:43 UTC on"),
        ("", "lost their connection at 00:16:43 UTC"),
    ],
)
@pytest.mark.parametrize("seen", [(IN_A_COLLECTIVE, IN_A_COLLECTIVE), ()], ids=["seen", "unseen"])
def test_ranks_that_hang_in_collectives_since_an_interruption_are_not_blamed(
    noticed: str, how: str, seen: tuple[dict[str, Any], ...]
) -> None:
    failure = hung(again(scripted(), noticed), *seen)
    assert (failure.cause, failure.node, failure.rank) == (Cause.FABRIC, 1, None)
    assert failure.message.startswith(f"{NAMED} {how}; ranks waited")


@pytest.mark.parametrize("noticed", ["silence", "closed", ""])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_by_itself_after_an_interruption_is_named_with_both(noticed: str, rank: int) -> None:
    seen = [IN_A_COLLECTIVE, IN_A_COLLECTIVE]
    seen[rank] = BUSY
    failure = hung(again(scripted(), noticed), *seen)
    assert (failure.cause, failure.rank) == (Cause.HANG, rank)
    assert f"Step after step 16 has not ended within 60 s; it is in read (data.py:9); before that {NAMED} " in failure.message


def test_an_interruption_after_which_all_ranks_went_on_is_told_with_a_later_hang() -> None:
    story = again(scripted(), "silence").waits(1).reports(0, Step(0, 17)).reports(1, Step(1, 17)).waits(1)
    failure = hung(story, IN_A_COLLECTIVE, IN_A_COLLECTIVE)
    assert (failure.cause, failure.rank) == (Cause.HANG, None)
    assert failure.message.startswith("every rank waits for the others")
    assert failure.message.endswith(f"; before that {NAMED} could not talk for 12 s, from 00:16:43 UTC on")


@pytest.mark.parametrize(
    ("line", "cause", "rank"),
    [
        ("RuntimeError: [transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete", Cause.FABRIC, None),
        ("RuntimeError: [transport/tcp/pair.cc:525] Read error [10.0.0.2]:4: Connection reset by peer", Cause.FABRIC, None),
        ("ValueError: bad label", Cause.USER_CODE, 0),
    ],
)
def test_after_an_interruption_ranks_fail_by_it_only_without_a_cause_of_their_own(line: str, cause: Cause, rank: int | None) -> None:
    story = again(scripted(), "silence").waits(20).exits(0, 1, last_lines=(line,)).waits(4)
    for each in range(2):
        story.hears(each, Dumped(1, each, **IN_A_COLLECTIVE))
    failure = ended(story, 0, 1)
    assert (failure.cause, failure.rank) == (cause, rank)
    assert (NAMED in failure.message) is (rank is None)


def test_a_watchdog_s_end_after_an_interruption_still_asks_where_the_others_are() -> None:
    story = (
        again(scripted(), "silence")
        .waits(20)
        .exits(0, 1, last_lines=("RuntimeError: Timed out waiting 30000ms for recv operation to complete",))
    )
    story.waits(4).hears(1, Dumped(1, 1, **BUSY))
    failure = ended(story, 0, 1)
    assert (failure.cause, failure.rank) == (Cause.HANG, 1)


def test_a_connection_that_is_made_anew_brings_the_place_that_a_rank_has_come_to() -> None:
    story = training(limit=600)
    beat = Beat(1, "Step 5", "update", 31, limit_seconds=600)
    story.waits(3).hears(
        1, hello(1, attempt=1, ranks=(RankState(1, True, progress=(rank_report_to_json(beat), rank_report_to_json(Step(1, 4)))),))
    )
    progress = story.gang.ranks[1].progress
    assert (progress.doing, progress.position, progress.step, progress.since) == ("Step 5, update", 31, 4, story.now)
    story.hears(1, hello(1, attempt=1, ranks=(RankState(1, True, progress=(rank_report_to_json(Step(1, 3)),)),)))
    assert story.gang.ranks[1].progress.step == 4


def test_a_coordinator_that_did_not_run_is_what_others_did_not_hear() -> None:
    story = training(limit=600).waits(40)
    story.gang = with_pause(story.gang, 39.0)
    stopped = RankState(1, True, RankExit(1, None, "SIGKILL", ordered=True))
    story.loses(1).hears(1, hello(1, known=1, ranks=(stopped,)))
    failure = ended(story, 0)
    assert (failure.cause, failure.node) == (Cause.NODE_LOST, 0)
    assert (
        failure.message
        == "the coordinator on node 0 (x-0) did not run for 39 s: its agent was stopped, or its machine froze; node 1 (x-1) heard nothing "
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
