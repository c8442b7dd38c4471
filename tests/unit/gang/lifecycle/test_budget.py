"""What kind of failure it was, what it costs, and when it is enough."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from lockstep_gang.contract.messages import Activity, Checkpoint, Leaving, RankState, Start, Started, Step, Stopped
from lockstep_gang.contract.report import Cause, CheckpointReport, Failure, Restart, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.contract.times import stamp
from lockstep_gang.lifecycle.budget import backoff_seconds, may_start_at
from lockstep_gang.lifecycle.causes import rank_cause
from lockstep_gang.lifecycle.gang import Budget, Phase, new_gang
from lockstep_gang.lifecycle.history import AttemptRecord, begun_records, closed_records, resume_gang
from lockstep_gang.lifecycle.tracebacks import Raised
from unit.gang.cases import make_run
from unit.gang.story import Story, all_stopped, failed_before, hello, started

CASES = [
    (True, 76, None, None, "", Cause.HANG),
    (True, 77, None, "OutOfMemoryError", "", Cause.OUT_OF_MEMORY),
    (True, 78, None, "ConfigError", "", Cause.CONFIGURATION),
    (True, 79, None, "NonFinite", "", Cause.NON_FINITE),
    (True, 1, None, "KeyError", "'x'", Cause.INTERNAL),
    (True, 1, None, "TrainerError", "step 4 could not be saved: rank 0: [Errno 28] No space left on device", Cause.STORAGE),
    (False, 78, None, None, "", Cause.USER_CODE),
    (False, 1, None, "ValueError", "no", Cause.USER_CODE),
    (False, 1, None, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB", Cause.OUT_OF_MEMORY),
    (False, 1, None, "RuntimeError", "CUDA out of memory. Tried to allocate 20.00 GiB", Cause.OUT_OF_MEMORY),
    (False, 1, None, "DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error", Cause.FABRIC),
    (False, 1, None, "RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4", Cause.FABRIC),
    (
        True,
        None,
        "SIGABRT",
        None,
        "[rank1]:[E] [PG 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)",
        Cause.HANG,
    ),
    (
        True,
        None,
        "SIGABRT",
        None,
        "[TC] Aborting process on rank 1 due to timeout - timeout watchdog detected operation timeout",
        Cause.HANG,
    ),
    (
        False,
        None,
        "SIGABRT",
        None,
        "[TC] Aborting process on rank 1 due to error - timeout watchdog detected operation error",
        Cause.FABRIC,
    ),
    (False, 1, None, "RuntimeError", "NCCL AllReduce failed: unhandled error NCCL Last Error: socketPollConnect", Cause.FABRIC),
    (False, 1, None, "OSError", "[Errno 28] No space left on device", Cause.STORAGE),
    (False, 1, None, "OSError", "[Errno 30] Read-only file system: '/workspace/x'", Cause.STORAGE),
    (False, 1, None, "ModuleNotFoundError", "No module named 'einops'", Cause.SETUP),
    (False, 2, None, None, "python3: can't open file '/workspace/trian.py': [Errno 2] No such file or directory", Cause.SETUP),
    (False, 1, None, "FileNotFoundError", "[Errno 2] No such file or directory: 'data.csv'", Cause.USER_CODE),
    (False, None, "SIGBUS", None, "", Cause.OUT_OF_MEMORY),
    (False, None, "SIGSEGV", None, "", Cause.USER_CODE),
    (True, None, "SIGSEGV", None, "", Cause.INTERNAL),
]


@pytest.mark.parametrize(("trainer", "code", "signal", "exception", "text", "cause"), CASES)
def test_the_cause_of_a_rank_s_end(
    trainer: bool, code: int | None, signal: str | None, exception: str | None, text: str, cause: Cause
) -> None:
    raised = Raised(exception, text) if exception is not None else None
    assert rank_cause(trainer, code, signal, raised, text) is cause


def started_again(story: Story) -> Story:
    """Both nodes run the attempt that was just begun."""
    for node in range(story.run.nodes):
        story.hears(node, Started(story.gang.attempt))
    return story


def failing(story: Story, said: str = "ValueError: no", rank: int = 1) -> Story:
    return all_stopped(story.exits(rank, 1, last_lines=("Traceback", said)))


def test_a_failure_says_its_cause_the_step_before_it_and_what_it_costs() -> None:
    story = failed_before(started(restart=RestartPolicy(3, 10)).reports(0, Step(0, 40), Checkpoint(0, 40, "/c"), Step(0, 47)))
    failing(story)
    assert (story.report.failure.cause, story.report.failure.step, story.report.failure.rank) == (Cause.USER_CODE, 47, 1)
    (cost,) = story.report.history
    assert (cost.attempt, cost.lost_steps, cost.downtime_seconds, cost.failure.last_lines) == (1, 7, None, ())


def test_lost_steps_count_from_the_commit_that_the_next_attempt_used() -> None:
    """A damaged newest commit is passed over: the way to the one before it is done again, too, and what is saved is that one."""
    story = failed_before(started(restart=RestartPolicy(3, 10)).reports(0, Step(0, 20), Checkpoint(0, 20, "/c/20"), Step(0, 23)))
    started_again(failing(story).waits(10)).reports(0, Activity(0, "Resume", 10, 60, "/c/10"))
    report = story.report
    assert (report.history[-1].lost_steps, report.trainer.step) == (13, 10)
    assert (report.checkpoint.step, report.checkpoint.path) == (10, "/c/10")
    story.reports(0, Step(0, 12)).reports(0, Activity(0, "Resume", 5, 60))
    assert (story.report.history[-1].lost_steps, story.report.checkpoint.step) == (13, 10), "a word that is told again changes nothing"
    failing(story, "ValueError: other")
    assert [cost.lost_steps for cost in story.report.history[-2:]] == [13, 2]


def test_the_first_step_after_a_restart_ends_the_downtime() -> None:
    story = started(restart=RestartPolicy(3, 10))
    started_again(failing(story).waits(10)).waits(3.4).reports(0, Step(0, 1)).waits(5).reports(0, Step(0, 2))
    assert [cost.downtime_seconds for cost in story.report.history] == [13]


def test_a_new_commit_fills_the_budget_and_ends_the_backoff() -> None:
    story = started(restart=RestartPolicy(1, 10))
    for step in (10, 20, 30):
        story.reports(0, Step(0, step), Checkpoint(0, step, "/c")).waits(10)
        failing(story)
        assert (story.report.state, story.report.restarts_counted) == (State.STARTING, 1)
        started_again(story)
    assert (story.report.restarts, story.report.state) == (3, State.RUNNING)
    failing(story, "ValueError: another")
    assert (story.report.state, story.report.restarts_counted) == (State.FAILED, 2)


def test_a_job_that_fails_right_after_each_of_its_commits_starts_again_once_in_a_backoff() -> None:
    story = started(restart=RestartPolicy(1, 10))
    begun = [story.gang.began_at]
    for step in range(1, 6):
        story.waits(1).reports(0, Step(0, step), Checkpoint(0, step, "/c")).waits(1)
        failing(story)
        while story.gang.attempt == step:
            story.waits(0.5)
        begun.append(story.gang.began_at)
        started_again(story)
    assert [later - earlier for earlier, later in pairwise(begun)] == [2, 10, 10, 10, 10]


@pytest.mark.parametrize(("ran", "failures", "wait"), [(0, 2, 10), (4, 2, 6), (10, 2, 0), (3600, 2, 0), (-3600, 2, 10), (0, 1, 0)])
def test_a_failure_after_a_commit_waits_for_what_its_attempt_left_of_a_backoff(ran: int, failures: int, wait: int) -> None:
    """The clock of the machine where it began may be ahead of this one's: nobody waits longer for that."""
    now, budget = 10_000.0, Budget(failures=failures, counted=1, committed_step=5)
    history = (Restart(1, stamp(now), Failure("no"), 0),) * failures
    run = make_run(restart=RestartPolicy(3, 10))
    assert may_start_at(replace(new_gang(run), began_at=now - ran, budget=budget, history=history), run, now) == now + wait


def test_another_coordinator_backs_off_after_the_second_failure_too() -> None:
    story = started(restart=RestartPolicy(3, 10))
    records = begun_records([], story.gang, story.run, "2026-01-01T00:00:00Z")
    records = closed_records(records, "Failed", failing(story).gang)
    records = begun_records(records, story.gang, story.run, "2026-01-01T00:00:00Z")
    records = closed_records(records, "Failed", failing(started_again(story), "ValueError: other").gang)
    again = Story(story.run, resume_gang(story.run, records, None, story.now)).hears(0, hello(0)).hears(1, hello(1))
    assert (again.gang.phase, again.waits(9.9).orders) == (Phase.WAITING, [])
    assert [order.attempt for _, order in again.waits(0.1).orders if isinstance(order, Start)] == [3, 3]


@pytest.mark.parametrize("said", ["ValueError: no", f"ValueError: {'no ' * 999}"])
def test_the_same_error_is_final_whichever_rank_is_heard_first(said: str) -> None:
    story = started(nodes=11, restart=RestartPolicy(9, 0)).reports(0, Step(0, 5))
    started_again(failing(story, said, rank=10)).reports(0, Step(0, 5))
    assert failing(story, said, rank=9).report.state is State.FAILED


@pytest.mark.parametrize(
    ("before", "after", "is_final"),
    [
        ((Step(1, 4), Step(0, 2)), (Step(1, 4), Step(0, 9)), True),
        ((Step(1, 4), Step(0, 9)), (Step(1, 5), Step(0, 9)), False),
        ((Step(0, 4),), (Step(0, 5),), True),  # rank 1 reports none, and rank 0 had not yet, or just, ended the step
        ((Step(0, 4),), (Step(0, 6),), False),
    ],
)
def test_the_failed_rank_s_own_step_tells_whether_the_error_comes_again(
    before: tuple[Step, ...], after: tuple[Step, ...], is_final: bool
) -> None:
    story = started(restart=RestartPolicy(9, 0))
    for step in before:
        story.reports(step.rank, step)
    started_again(failing(story))
    for step in after:
        story.reports(step.rank, step)
    assert (failing(story).report.state is State.FAILED) == is_final


@pytest.mark.parametrize(
    ("step", "said", "is_final"),
    [(5, "ValueError: no", True), (7, "ValueError: no", False), (5, "ValueError: other", False), (5, "ConnectionResetError: no", False)],
)
def test_the_same_error_of_the_user_s_code_at_the_same_step_is_final_and_another_is_tried_again(
    step: int, said: str, is_final: bool
) -> None:
    story = started(restart=RestartPolicy(9, 0)).reports(0, Step(0, 5))
    started_again(failing(story)).reports(0, Step(0, step))
    assert (failing(story, said).report.state is State.FAILED) == is_final


def test_a_node_that_was_told_to_go_and_did_not_get_to_save_does_not_count() -> None:
    story = started(restart=RestartPolicy(0, 10)).hears(1, Leaving()).loses(1).exits(0, 1).hears(0, Stopped(1)).waits(60)
    assert (story.report.state, story.report.history, story.records) == (State.WAITING, (), ["begin", "Stopped"])


def test_history_keeps_the_last_ten() -> None:
    story = started(restart=RestartPolicy(99, 0))
    for number in range(12):
        started_again(failing(story, f"ValueError: {number}"))
    assert [cost.attempt for cost in story.report.history] == list(range(3, 13))


def test_budget_and_history_outlive_the_coordinator() -> None:
    story = started(restart=RestartPolicy(1, 10)).reports(0, Step(0, 40), Checkpoint(0, 40, "/c"), Step(0, 47))
    begun = begun_records([], story.gang, story.run, "2026-01-01T00:00:00Z")
    failing(story)
    records = closed_records(begun, "Failed", story.gang)
    again = Story(story.run, resume_gang(story.run, records, None, story.now)).decide()
    assert again.report.history == story.report.history
    assert (again.report.restarts_counted, again.report.checkpoint, again.gang.failure.cause) == (
        1,
        story.report.checkpoint,
        Cause.USER_CODE,
    )
    again.hears(0, hello(0)).hears(1, hello(1))
    assert [order.attempt for _, order in again.orders if isinstance(order, Start)] == [2, 2]
    assert failing(started_again(again), "ValueError: other").report.state is State.FAILED


def test_each_end_of_a_coordinator_without_a_word_counts_though_nobody_could_record_it_then() -> None:
    run = make_run(restart=RestartPolicy(1, 0))
    records = []
    for _ in range(2):
        story = Story(run, resume_gang(run, records, None, 1000.0)).hears(0, hello(0)).hears(1, hello(1))
        records = begun_records(records, story.gang, run, "2026-01-01T00:00:00Z")
    assert Story(run, resume_gang(run, records, None, 1000.0)).decide().report.state is State.FAILED


def died(story: Story, records: list[Any]) -> tuple[Story, list[Any]]:
    """Node 0 with its coordinator is killed in the middle of the attempt; the next one has the records, and the commit beside them."""
    commit = story.gang.checkpoint
    again = Story(story.run, resume_gang(story.run, records, None, story.now, commit))
    again.now = story.now + 60
    again.hears(0, hello(0)).hears(1, hello(1)).waits(10)
    return again, begun_records(records, again.gang, story.run, "2026-01-01T00:00:00Z") if again.gang.ending is None else records


def test_commits_fill_the_budget_though_each_attempt_ends_with_its_coordinator() -> None:
    story = started(restart=RestartPolicy(3, 0))
    records = begun_records([], story.gang, story.run, "2026-01-01T00:00:00Z")
    for attempt in range(1, 8):
        assert (story.gang.attempt, story.report.state) == (attempt, State.STARTING if attempt > 1 else State.RUNNING)
        story.waits(100).reports(0, Step(0, 1000 * attempt), Checkpoint(0, 1000 * attempt, f"/c/{attempt}"))
        story, records = died(story, records)
        assert (story.report.restarts, story.report.restarts_counted) == (attempt, 1)
    failing(started_again(story).reports(0, Step(0, 7047)))
    assert story.report.history[-1].lost_steps == 47


def test_without_new_commits_a_coordinator_that_dies_spends_the_budget() -> None:
    story = started(restart=RestartPolicy(3, 0)).reports(0, Checkpoint(0, 1000, "/c"))
    records = begun_records([], story.gang, story.run, "2026-01-01T00:00:00Z")
    for _ in range(4):
        story, records = died(story, records)
    assert (story.report.state, story.report.restarts_counted) == (State.FAILED, 4)


def test_the_newer_of_two_commits_counts_wherever_it_was_written_down() -> None:
    story = started(restart=RestartPolicy(3, 0)).reports(0, Checkpoint(0, 40, "/c/40"))
    records = begun_records([], story.gang, story.run, "2026-01-01T00:00:00Z")
    older = CheckpointReport(90, "/c/90", "1970-01-01T00:00:01Z")  # an attempt went back behind it
    assert resume_gang(story.run, records, None, 2000.0, older).checkpoint == story.gang.checkpoint
    newer = CheckpointReport(20, "/c/20", "1970-01-01T01:00:00Z")
    assert resume_gang(story.run, records, None, 2000.0, newer).checkpoint == newer


def test_downtime_begins_with_the_last_step_and_not_when_the_failure_was_noticed() -> None:
    story = started(restart=RestartPolicy(3, 10)).reports(0, Step(0, 40)).waits(35)
    started_again(failing(story).waits(10)).waits(2).reports(0, Step(0, 41))
    (cost,) = story.report.history
    assert (cost.downtime_seconds, cost.down_since, cost.failed) == (47, "1970-01-01T00:16:40Z", "1970-01-01T00:17:15Z")


def test_an_attempt_that_never_came_to_a_step_makes_the_downtime_before_it_longer() -> None:
    story = started(restart=RestartPolicy(3, 10)).reports(0, Step(0, 40)).waits(5)
    started_again(failing(story).waits(10)).waits(4)
    started_again(failing(story, "ValueError: another").waits(20)).waits(1).reports(0, Step(0, 41))
    assert [cost.downtime_seconds for cost in story.report.history] == [None, 40]


def test_downtime_after_the_coordinator_s_death_begins_when_it_was_last_alive_or_the_ranks_last_stepped() -> None:
    run = make_run(restart=RestartPolicy(3, 10))
    records = [AttemptRecord(1, run.job.uid, 0, "1970-01-01T00:00:00Z")]
    story = Story(run, resume_gang(run, records, None, 1000.0, None, 970.0))
    assert story.gang.history[0].down_since == "1970-01-01T00:16:10Z"
    story.hears(1, hello(1, attempt=1, ranks=(RankState(1, True, step=48, step_age_seconds=22),)))
    assert story.gang.history[0].down_since == "1970-01-01T00:16:18Z"


@pytest.mark.parametrize(("stated", "failures", "wait"), [(10, 6, 160), (10, 7, 300), (10, 30, 300), (400, 7, 400)])
def test_a_backoff_is_doubled_up_to_300_s_and_never_shorter_than_stated(stated: int, failures: int, wait: int) -> None:
    assert backoff_seconds(make_run(restart=RestartPolicy(99, stated)), failures) == wait
