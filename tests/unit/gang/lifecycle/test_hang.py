"""When a rank is taken for hung, who is named, and what happens then; no process, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep_gang.contract.messages import Activity, Beat, Checkpoint, Dumped, Error, RankReport, RankState, Start, Step, Stop, StopMode
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.lifecycle.gang import Phase
from lockstep_gang.lifecycle.hang import with_pause
from lockstep_spec.choices import Timeouts
from unit.gang.story import Story, all_stopped, hello, started

SEEK_SECONDS = 3.0

LIMITS = Timeouts(step_seconds=60, evaluate_seconds=600, save_seconds=300)


def scripted(**changes: Any) -> Story:
    """Two ranks of a script, which have reported step 3."""
    story = started(timeouts=LIMITS, restart=RestartPolicy(1, 0), **changes)
    for rank in range(story.run.world_size):
        story.reports(story.run.node_of(rank), Step(rank, 3))
    return story


def trained(**changes: Any) -> Story:
    """Two ranks of the trainer, which tell where they are."""
    story = started(training={}, **changes)
    for rank in range(story.run.world_size):
        story.reports(story.run.node_of(rank), Beat(rank, "Step 4", "forward of micro-batch 1 of 1", 20, limit_seconds=120))
    return story


def dumped(story: Story, rank: int, **seen: Any) -> Story:
    return story.hears(story.run.node_of(rank), Dumped(story.gang.attempt, rank, **seen))


def failure(story: Story) -> Any:
    """Of the attempt, once all of its ranks are stopped."""
    for rank in range(story.run.world_size):
        if story.gang.ranks[rank].exit is None:
            story.exits(rank, None, signal="SIGKILL", ordered=True)
    return all_stopped(story).gang.failure


def test_a_script_that_never_reported_a_step_is_never_judged() -> None:
    story = started(timeouts=LIMITS).reports(0, Activity(0, "Load")).waits(10**7)
    assert story.gang.phase is Phase.ACTIVE
    assert story.wake_at is None


def test_ranks_that_report_steps_are_stopped_after_the_limit_and_not_before() -> None:
    story = scripted()
    assert story.wake_at == story.now + 60
    assert story.waits(59).gang.phase is Phase.ACTIVE
    story.waits(1)
    assert (story.gang.phase, story.gang.stopping) == (Phase.STOPPING, StopMode.DUMP)
    assert [order.mode for _, order in story.orders if isinstance(order, Stop)] == [StopMode.DUMP] * 2


@pytest.mark.parametrize(
    ("report", "seconds"),
    [(Activity(1, "Evaluate"), 600), (Activity(1, "Save"), 300), (Activity(1, "Sleep"), 60), (Checkpoint(1, 3, "/c"), 60)],
)
def test_each_activity_has_its_own_limit(report: RankReport, seconds: int) -> None:
    story = scripted(nodes=1, ranks_per_node=2).reports(0, Activity(0, "Export")).waits(30).reports(0, report)
    assert story.waits(seconds - 1).gang.phase is Phase.ACTIVE
    assert story.waits(1).gang.phase is Phase.STOPPING


def test_a_step_ends_an_evaluation_that_nobody_said_the_end_of() -> None:
    story = scripted(nodes=1).reports(0, Activity(0, "Evaluate"), Step(0, 4))
    assert story.waits(60).gang.phase is Phase.STOPPING


def test_the_rank_that_misses_the_newest_step_is_named_with_its_file_and_the_gang_starts_again() -> None:
    story = scripted().reports(0, Step(0, 4)).waits(60)
    found = failure(dumped(dumped(story, 0, stacks="/r/0"), 1, stacks="/r/1"))
    assert (found.cause, found.rank, found.node, found.activity, found.step) == (Cause.HANG, 1, 1, "Step after step 3", 4)
    assert found.stacks == "/r/1"
    assert found.message == "rank 1 on node 1 hangs: Step after step 3 has not ended within 60 s; stacks of all its threads are in /r/1"
    assert any(isinstance(order, Start) and order.attempt == 2 for _, order in story.orders)


def test_a_hang_has_the_last_lines_of_the_rank_that_is_named_and_says_if_its_script_has_ended() -> None:
    story = dumped(scripted().reports(0, Step(0, 4)).waits(60), 1, at="_shutdown (threading.py:1590)")
    for rank, line in enumerate(("step 4", "ValueError: bad label")):
        story.exits(rank, None, signal="SIGKILL", ordered=True, last_lines=(line,))
    found = failure(story)
    assert (found.rank, found.last_lines) == (1, ("ValueError: bad label",))
    assert "its script has ended, and one of its threads that is not a daemon keeps the process" in found.message


def test_of_ranks_that_came_equally_far_the_stopped_one_is_named() -> None:
    found = failure(dumped(dumped(scripted().waits(60), 0, state="S", at="step (a.py:3)", waits_for_others=True), 1, state="T"))
    assert (found.rank, "its process is stopped (state T)" in found.message) == (1, True)


def test_of_ranks_that_came_equally_far_the_one_outside_of_a_collective_is_named_with_its_line() -> None:
    story = dumped(scripted().waits(60), 0, state="S", at="step (a.py:3)", waits_for_others=True)
    found = failure(dumped(story, 1, state="S", at="read (data.py:9)"))
    assert (found.rank, "it is in read (data.py:9)" in found.message) == (1, True)


@pytest.mark.parametrize(("gpus", "blamed"), [(0, "the network between them"), (1, "a GPU or the network between them")])
def test_when_every_rank_waits_in_a_collective_no_rank_is_blamed(gpus: int, blamed: str) -> None:
    story = scripted(gpus_per_node=gpus).waits(60)
    for rank in (0, 1):
        dumped(story, rank, state="S", at="step (a.py:3)", waits_for_others=True)
    found = failure(story)
    assert (found.rank, found.cause) == (None, Cause.HANG)
    assert found.message.startswith(f"every rank waits for the others, so what hangs is {blamed}")


def test_ranks_that_wait_in_different_calls_are_told_with_their_places() -> None:
    story = scripted().waits(60)
    for rank, at in enumerate(("new_group (a.py:3)", "all_reduce (a.py:4)")):
        dumped(story, rank, state="S", at=at, waits_for_others=True)
    found = failure(story)
    assert (found.rank, found.message.partition(":")[0]) == (
        None,
        "every rank waits for the others, at different places (rank 0 in new_group (a.py",
    )
    assert "rank 1 in all_reduce (a.py:4)): they don't make the same calls in the same order, or what hangs is the network" in found.message


def test_a_process_that_waits_for_a_device_is_told_with_the_kernel_s_function() -> None:
    story = scripted().reports(0, Step(0, 4)).waits(60)
    assert "state D, in the kernel's nfs_wait" in failure(dumped(story, 1, state="D", kernel_function="nfs_wait")).message


def test_a_rank_with_a_watchdog_of_its_own_is_judged_a_little_later_by_its_own_limit() -> None:
    story = trained()
    assert story.waits(134).gang.phase is Phase.ACTIVE
    assert story.waits(1).gang.phase is Phase.STOPPING
    assert story.gang.hang.limit_seconds == 120


def test_a_small_limit_is_never_doubled() -> None:
    story = started(training={}, nodes=1).reports(0, Beat(0, "Step 4", "", 20, limit_seconds=10))
    assert story.waits(16).gang.phase is Phase.STOPPING


def test_beats_of_one_activity_do_not_make_its_limit_longer_but_a_new_activity_does() -> None:
    story = trained()
    for seconds in range(5, 131, 5):
        story.waits(5).reports(0, Beat(0, "Step 4", "optimizer", 20 + seconds, 120)).reports(
            1, Beat(1, "Step 4", "optimizer", 20 + seconds, 120)
        )
    assert story.gang.phase is Phase.ACTIVE
    assert story.waits(5).gang.phase is Phase.STOPPING
    story = trained().waits(100)
    for rank in (0, 1):
        story.reports(rank, Beat(rank, "Step 5", "", 30, 120))
    assert story.waits(134).gang.phase is Phase.ACTIVE


def test_the_rank_furthest_back_is_named_with_what_it_was_in() -> None:
    story = trained()
    for _ in range(27):
        story.waits(5)
        for rank, position in ((0, 23), (1, 20)):
            story.reports(
                rank,
                Beat(rank, "Step 4", "forward of micro-batch 1 of 1" if rank else "waiting for the other ranks' losses", position, 120),
            )
    found = failure(story)
    assert (found.rank, found.activity) == (1, "Step 4, forward of micro-batch 1 of 1")


def test_a_rank_that_is_not_heard_of_any_more_is_named_though_it_came_as_far() -> None:
    story = trained()
    for _ in range(27):
        story.waits(5).reports(0, Beat(0, "Step 4", "forward of micro-batch 1 of 1", 20, 120))
    assert failure(story).rank == 1


def test_a_hang_that_the_trainer_noticed_by_itself_is_named_in_the_same_way() -> None:
    story = trained().reports(0, Beat(0, "Step 4", "waiting for the other ranks' losses", 23, 120)).waits(121)
    story.reports(0, Error(0, "Hang", "Step 4 has not ended within 120 s: rank 1 has not finished it")).exits(0, 76)
    assert story.gang.stopping is StopMode.DUMP
    found = failure(dumped(story, 1, state="T", stacks="/r/1"))
    assert (found.rank, found.activity, found.stacks) == (1, "Step 4, forward of micro-batch 1 of 1", "/r/1")
    assert found.message.startswith("rank 1 on node 1 hangs: Step 4, forward of micro-batch 1 of 1 has not ended within 120 s")


def test_a_rank_that_others_lost_because_it_was_stopped_is_the_failure() -> None:
    story = trained().reports(1, Error(1, "DistBackendError", "Timed out waiting 600000ms for recv operation")).exits(1, 1)
    assert story.gang.stopping is StopMode.DUMP
    found = failure(dumped(story, 0, state="T"))
    assert (found.cause, found.rank) == (Cause.HANG, 0)


def test_a_rank_that_was_done_too_early_is_named_and_not_the_one_that_waits_for_it() -> None:
    story = dumped(scripted().exits(1).waits(60), 0, at="step (train.py:7)", waits_for_others=True)
    found = failure(story)
    assert (found.cause, found.rank, found.exit_code) == (Cause.USER_CODE, 1, 0)
    assert (
        found.message
        == "rank 1 on node 1 exited with 0 while others still needed it: rank 0 on node 0 waits: Step after step 3 has not ended"
    )


def test_what_a_rank_wrote_that_was_done_too_early_is_told_and_not_its_victims_last_lines() -> None:
    wrote = ("Traceback (most recent call last):", '  File "a.py", line 3', "KeyError: 'labels'")
    story = scripted().exits(1, last_lines=wrote).waits(60)
    found = failure(dumped(story, 0, at="step (train.py:7)", waits_for_others=True))
    assert (found.rank, found.last_lines) == (1, wrote)
    assert found.message.startswith(
        "rank 1 on node 1 exited with 0 after it wrote KeyError: 'labels' (behind a pipe, such as to tee, its exit code is lost: set -o"
        " pipefail) while"
    )


GAVE_UP = ("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 4000ms for recv operation to complete",)


@pytest.mark.parametrize(("waits", "rank"), [(True, None), (False, 0)])
def test_the_one_rank_that_has_not_given_up_is_named_unless_it_waits_like_the_others(waits: bool, rank: int | None) -> None:
    story = scripted().exits(1, 1, last_lines=GAVE_UP).waits(SEEK_SECONDS)
    story = dumped(story, 0, at="step (train.py:7)", waits_for_others=waits)
    found = failure(story)
    assert (found.cause, found.rank) == (Cause.HANG, rank)


def test_who_gave_up_waiting_for_a_rank_that_then_fails_is_not_named() -> None:
    story = scripted().exits(1, 1, last_lines=GAVE_UP).waits(SEEK_SECONDS / 2).exits(0, 1, last_lines=("ValueError: boom",))
    assert (failure(story).rank, story.gang.failure.cause) == (0, Cause.USER_CODE)


def test_who_gave_up_waiting_for_a_rank_that_was_done_is_not_named() -> None:
    story = scripted().exits(1).exits(0, 1, last_lines=GAVE_UP)
    assert (failure(story).rank, story.gang.failure.cause) == (1, Cause.USER_CODE)


def test_a_rank_that_hangs_by_itself_is_named_though_others_are_done() -> None:
    found = failure(dumped(scripted().exits(1).waits(60), 0, at="read (data.py:7)"))
    assert (found.cause, found.rank) == (Cause.HANG, 0)


def test_a_stopped_rank_is_the_failure_of_one_that_nccl_s_watchdog_aborted() -> None:
    said = ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",)
    found = failure(dumped(trained().exits(1, None, signal="SIGABRT", last_lines=said), 0, state="T"))
    assert (found.cause, found.rank) == (Cause.HANG, 0)


def test_an_error_of_the_user_s_code_counts_more_than_a_stopped_rank() -> None:
    story = scripted().reports(1, Error(1, "ValueError", "boom")).exits(1, 1)
    assert failure(dumped(story, 0, state="T")).cause is Cause.USER_CODE


def test_a_rank_of_a_node_that_is_away_is_not_judged_and_has_time_once_it_is_back() -> None:
    story = trained().waits(119)
    story.loses(1)
    story.waits(4).hears(1, hello(1, attempt=1, ranks=(RankState(1, True),)))
    story.reports(0, Beat(0, "Step 5", "", 30, 120))
    assert story.waits(130).gang.phase is Phase.ACTIVE
    assert story.waits(5).gang.phase is Phase.STOPPING


def test_time_in_which_the_coordinator_itself_did_not_run_is_nobody_s() -> None:
    story = scripted()
    story.now += 1000
    story.gang = with_pause(story.gang, 1000)
    assert story.decide().gang.phase is Phase.ACTIVE


def test_a_rank_that_has_ended_is_not_judged() -> None:
    story = scripted().exits(1, 0).reports(0, Activity(0, "Export"))
    assert story.waits(3600).gang.phase is Phase.ACTIVE


def test_a_hang_of_the_last_attempt_fails_the_job_in_the_same_words() -> None:
    story = scripted(nodes=1)
    story.run = replace(story.run, restart=RestartPolicy(0, 0))
    found = failure(story.waits(60))
    assert (story.report.state, story.report.message) == (State.FAILED, found.message)
    assert story.report.failure.rank == 0


def test_the_next_attempt_knows_nothing_of_the_hang_before_it() -> None:
    story = scripted()
    failure(dumped(story.waits(60), 1, state="T"))
    assert (story.gang.attempt, story.gang.hang, story.gang.dumps) == (2, None, ())


@pytest.mark.parametrize(
    ("report", "seconds"),
    [
        (Step(0, 4), 3600),
        (Step(0, 9, total_steps=9), 14400),  # an export follows the last step
        (Activity(0, "Evaluate"), 7200),
        (Activity(0, "Save"), 3600),
        (Activity(0, "Load"), 14400),
    ],
)
def test_a_job_that_states_no_limit_has_so_long_for_an_activity(report: RankReport, seconds: int) -> None:
    story = started(nodes=1).reports(0, Step(0, 3), report)
    assert story.waits(seconds - 1).gang.phase is Phase.ACTIVE
    assert story.waits(1).gang.phase is Phase.STOPPING
