"""The lifecycle, by its transitions: state and event in, state, orders and records out. No process, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep_gang.contract.messages import (
    Activity,
    Checkpoint,
    End,
    Error,
    Evaluate,
    Exited,
    Finish,
    Leaving,
    RankExit,
    RankState,
    Reported,
    Start,
    Started,
    Step,
    Stop,
    StopMode,
    Stopped,
)
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.lifecycle.budget import backoff_seconds
from lockstep_gang.lifecycle.gang import Budget, Phase
from lockstep_gang.lifecycle.history import AttemptRecord, end_record, resume_gang
from lockstep_gang.lifecycle.tracebacks import raised_in
from unit.gang.cases import make_run
from unit.gang.story import Story, all_stopped, failed_before, hello, started

RECONNECT_SECONDS = 5.0
SEEK_SECONDS = 3.0


def killed(rank: int) -> dict[str, Any]:
    return {"code": None, "signal": "SIGKILL", "ordered": True, "rank": rank}


def test_nothing_starts_before_every_node_is_there() -> None:
    story = Story(make_run()).hears(0, hello(0))
    assert (story.orders, story.report.state, story.report.message) == ([], State.WAITING, "waiting for node 1 of 2")


def test_all_nodes_start_together_after_the_attempt_was_recorded() -> None:
    story = Story(make_run()).hears(0, hello(0)).hears(1, hello(1))
    start = Start(1, 0, "127.0.0.1", 29500)
    assert (story.orders, story.records, story.report.state) == ([(0, start), (1, start)], ["begin"], State.STARTING)


def test_the_next_attempt_is_one_more_than_any_that_somebody_knows() -> None:
    story = Story(make_run()).hears(0, hello(0, known=3)).hears(1, hello(1, known=7))
    assert story.gang.attempt == 8


def test_a_script_s_ranks_are_ready_when_they_run() -> None:
    assert started().report.state is State.RUNNING
    assert started().report.ranks.ready == 2


def test_lockstep_s_trainer_is_ready_when_every_rank_was_heard() -> None:
    story = started(training={})
    assert (story.report.state, story.report.message) == (
        State.STARTING,
        "0 of 2 ranks have reported; waiting for ranks 0, 1 on nodes 0, 1",
    )
    story.reports(0, Activity(0, "Init"))
    assert story.report.nodes[0].ready_ranks == 1
    assert story.reports(1, Activity(1, "Init")).report.state is State.RUNNING


def test_the_job_is_complete_when_every_rank_is_done_and_the_end_is_recorded_before_anybody_hears_it() -> None:
    story = started().exits(0)
    assert story.report.state is State.RUNNING
    story.exits(1)
    assert story.records == ["begin", "end", "Complete"]
    assert story.orders == [(node, Finish(State.COMPLETE, "all ranks are done")) for node in (0, 1)]


def test_the_trainer_s_success_is_believed_only_with_its_report_of_the_end() -> None:
    silent = started(training={}).exits(0)
    assert silent.gang.phase is Phase.STOPPING
    assert "without reporting the end" in silent.gang.stop_reason
    spoken = started(training={}).reports(0, End(0, {"adapter": "/a"})).exits(0).exits(1)
    assert (spoken.report.state, spoken.report.result) == (State.COMPLETE, {"adapter": "/a"})


def test_a_failed_rank_stops_every_node_at_once() -> None:
    story = started().exits(1, 1)
    assert [(node, order.mode) for node, order in story.orders if isinstance(order, Stop)] == [(0, StopMode.KILL), (1, StopMode.KILL)]


def test_the_job_fails_when_nothing_of_it_runs_any_more() -> None:
    story = started().exits(1, 1, last_lines=("ValueError: boom",)).hears(1, Stopped(1))
    assert story.report.state is State.RUNNING
    story.exits(**killed(0)).hears(0, Stopped(1))
    failure = story.report.failure
    assert story.records == ["begin", "end", "Failed"]
    assert (failure.rank, failure.node, failure.exit_code, failure.exception, failure.last_lines) == (
        1,
        1,
        1,
        "ValueError",
        ("ValueError: boom",),
    )
    assert story.report.message == "rank 1 on node 1 exited with 1: ValueError: boom"


LOST_PEER = ("RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:42",)


@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_that_failed_is_named_and_not_the_one_that_lost_its_peer(first: int) -> None:
    ends = {0: ("KeyError: 'x'",), 1: LOST_PEER}
    story = started()
    for rank in (first, 1 - first):
        story.exits(rank, 1, last_lines=ends[rank])
    story.hears(0, Stopped(1)).hears(1, Stopped(1))
    assert (story.report.failure.rank, story.report.failure.exception) == (0, "KeyError")


CONSEQUENCES = {
    "gloo": LOST_PEER,
    "a store": ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes",),
    "a pipe": ("ConnectionResetError: [Errno 104] Connection reset by peer",),
    "another process": ("EOFError",),
    "NCCL": ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error",),
}


@pytest.mark.parametrize("consequence", CONSEQUENCES)
def test_who_fails_for_want_of_its_peer_is_heard_first_and_not_named(consequence: str) -> None:
    story = started().exits(0, 1, last_lines=CONSEQUENCES[consequence])
    assert (story.gang.phase, story.wake_at) == (Phase.ACTIVE, story.now + SEEK_SECONDS)
    story.waits(SEEK_SECONDS / 2).exits(1, 3)
    assert story.gang.phase is Phase.STOPPING
    failure = all_stopped(story).gang.failure
    assert (failure.rank, failure.exit_code, failure.cause) == (1, 3, Cause.USER_CODE)


def test_a_peer_that_does_not_end_is_not_waited_for_any_longer() -> None:
    story = started().exits(0, 1, last_lines=LOST_PEER).waits(SEEK_SECONDS)
    assert story.gang.phase is Phase.STOPPING
    failure = all_stopped(story.exits(**killed(1))).gang.failure
    assert (failure.rank, failure.cause) == (0, Cause.FABRIC)


def test_nobody_is_waited_for_who_is_known_to_be_gone() -> None:
    story = started().loses(1).exits(0, 1, last_lines=LOST_PEER)
    assert story.gang.phase is Phase.STOPPING
    assert started().exits(0, 1, last_lines=LOST_PEER).exits(1, 1, last_lines=LOST_PEER).gang.phase is Phase.STOPPING


def test_a_cause_among_many_consequences_ends_the_wait_at_once() -> None:
    story = started(nodes=4)
    for rank in (0, 2):
        story.exits(rank, 1, last_lines=LOST_PEER)
    assert (story.gang.phase, story.gang.examined) == (Phase.ACTIVE, 2)
    assert story.exits(3, 1, last_lines=("ValueError: boom",)).gang.phase is Phase.STOPPING


def test_words_of_a_lost_peer_beside_a_rank_s_own_exception_make_it_no_consequence() -> None:
    noise = "[W1122 TCPStore.cpp:125] recvValue failed: Connection reset by peer"
    story = started().exits(1, 1, last_lines=("ValueError: boom", noise))
    assert story.gang.phase is Phase.STOPPING
    assert all_stopped(story).gang.failure.cause is Cause.USER_CODE


def test_the_first_of_two_failures_is_named() -> None:
    story = started().exits(1, 3).exits(0, 4).hears(0, Stopped(1)).hears(1, Stopped(1))
    assert (story.report.failure.rank, story.report.failure.exit_code) == (1, 3)


def test_a_rank_that_said_what_is_wrong_is_named_though_it_was_killed_before_its_exit() -> None:
    story = started().reports(1, Error(1, "ValueError", "boom")).exits(0, 1, last_lines=LOST_PEER)
    story.exits(**killed(1)).hears(0, Stopped(1)).hears(1, Stopped(1))
    failure = story.report.failure
    assert (failure.rank, failure.exception, failure.exit_code, failure.signal) == (1, "ValueError", None, None)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (("ValueError: boom",), ("ValueError", "boom")),
        (("[rank1]: ValueError: boom", "[W] a warning at the end"), ("ValueError", "boom")),
        (("torch.cuda.OutOfMemoryError: CUDA out of memory.",), ("OutOfMemoryError", "CUDA out of memory.")),
        (("AssertionError",), ("AssertionError", "")),
    ],
)
def test_an_exception_is_found_in_the_last_lines(lines: tuple[str, ...], named: tuple[str, str]) -> None:
    raised = raised_in(lines)
    assert (raised.exception, raised.message) == named


def test_lines_without_an_exception_name_none() -> None:
    assert raised_in(("Segmentation fault", "an Error: in the middle", "")) is None


def test_a_rank_ended_by_a_signal_is_named_with_it() -> None:
    story = started().exits(0, None, signal="SIGSEGV").hears(0, Stopped(1)).hears(1, Stopped(1))
    assert (story.report.failure.signal, story.report.message) == ("SIGSEGV", "rank 0 on node 0 was ended by SIGSEGV")


def test_the_first_failure_is_followed_by_another_attempt_at_once() -> None:
    story = started(restart=RestartPolicy(1, 10)).exits(1, 1).hears(0, Stopped(1)).hears(1, Stopped(1))
    assert story.orders == [(node, Start(2, 1, "127.0.0.1", 29501)) for node in (0, 1)]
    assert (story.report.restarts, story.report.failure, story.records) == (1, None, ["begin", "Failed", "begin"])


def test_a_second_failure_without_a_commit_is_followed_by_another_attempt_after_the_backoff() -> None:
    story = failed_before(started(restart=RestartPolicy(2, 10))).exits(1, 1).hears(0, Stopped(1)).hears(1, Stopped(1))
    assert (story.report.state, story.report.restarts, story.wake_at) == (State.BACKING_OFF, 0, 1005.0)
    assert story.waits(9).orders == []
    story.waits(1)
    assert story.orders == [(node, Start(2, 2, "127.0.0.1", 29501)) for node in (0, 1)]
    assert (story.report.restarts, story.report.failure, story.records) == (2, None, ["begin", "Failed", "begin"])


def test_the_backoff_counts_from_the_failure_and_not_from_the_end_of_the_last_rank() -> None:
    story = failed_before(started(restart=RestartPolicy(2, 10))).exits(1, 1).waits(4).hears(0, Stopped(1)).hears(1, Stopped(1))
    assert story.waits(5.9).orders == []
    assert [type(order) for _, order in story.waits(0.1).orders] == [Start, Start]


def test_a_node_whose_ranks_ended_by_themselves_is_started_again_too() -> None:
    story = started(restart=RestartPolicy(1, 0)).exits(0).hears(0, Stopped(1)).exits(1, 1).hears(1, Stopped(1))
    assert [(node, order.attempt) for node, order in story.orders if isinstance(order, Start)] == [(0, 2), (1, 2)]


def test_the_last_allowed_failure_is_final() -> None:
    story = started(restart=RestartPolicy(1, 0)).exits(1, 1).hears(0, Stopped(1)).hears(1, Stopped(1))
    assert story.gang.attempt == 2
    story.exits(0, 1).hears(0, Stopped(2)).hears(1, Stopped(2))
    assert (story.report.state, story.report.restarts) == (State.FAILED, 1)


def test_what_the_trainer_notes_of_its_end_is_in_the_last_word() -> None:
    note = "nothing was left to do: step 2 of 2 is in /c"
    story = started(training={}).reports(0, End(0, {"note": note})).exits(0).exits(1)
    assert (story.report.state, story.report.message) == (State.COMPLETE, f"all ranks are done; {note}")


def test_a_wrong_configuration_is_not_tried_again() -> None:
    story = started(training={}, restart=RestartPolicy(5, 0)).exits(0, 78).hears(0, Stopped(1)).hears(1, Stopped(1))
    assert story.report.state is State.FAILED
    assert "exited with 78 (configuration)" in story.report.message


def test_the_same_code_of_a_user_s_script_means_nothing_in_particular() -> None:
    story = failed_before(started(restart=RestartPolicy(5, 10))).exits(0, 78).hears(0, Stopped(1)).hears(1, Stopped(1))
    assert story.report.state is State.BACKING_OFF


@pytest.mark.parametrize(("failures", "seconds"), [(0, 0), (1, 0), (2, 10), (3, 20), (4, 40), (7, 300), (1000, 300)])
def test_the_backoff_begins_with_the_second_failure_and_doubles_up_to_five_minutes(failures: int, seconds: int) -> None:
    assert backoff_seconds(make_run(restart=RestartPolicy(1000, 10)), failures) == seconds


@pytest.mark.parametrize("failures", [2, 3, 1000])
def test_who_asks_for_a_longer_backoff_than_that_gets_it(failures: int) -> None:
    assert backoff_seconds(make_run(restart=RestartPolicy(1000, 900)), failures) == 900


def test_a_node_that_comes_back_in_time_changes_nothing() -> None:
    story = started().loses(1)
    assert story.wake_at == 1000 + RECONNECT_SECONDS
    story.waits(RECONNECT_SECONDS - 1).hears(1, hello(1, attempt=1, ranks=(RankState(1, True),)))
    assert (story.report.state, story.orders, story.waits(60).report.state) == (State.RUNNING, [], State.RUNNING)


def test_a_node_that_does_not_come_back_fails_the_attempt_by_its_name() -> None:
    story = started().loses(1).exits(0, 1, last_lines=LOST_PEER)
    assert [node for node, _ in story.orders] == [0]
    story.hears(0, Stopped(1))
    assert (story.report.state, story.report.failure.node, story.report.failure.rank) == (State.FAILED, 1, None)


def test_a_silent_loss_is_noticed_by_time_alone() -> None:
    story = started().loses(1).waits(RECONNECT_SECONDS)
    assert story.gang.phase is Phase.STOPPING
    assert story.gang.stop_reason.startswith("node 1 was lost")


def test_another_agent_on_the_same_node_has_lost_its_ranks() -> None:
    story = started().loses(1).hears(1, hello(1, instance="another"))
    assert story.gang.phase is Phase.STOPPING


def test_an_exit_that_was_not_heard_is_heard_with_the_next_connection() -> None:
    state = RankState(1, True, RankExit(1, 5, None, ordered=False))
    story = started().loses(1).hears(1, hello(1, known=1, ranks=(state,)))
    assert "rank 1 on node 1 exited with 5" in story.gang.stop_reason


UNHEARD = (
    "node 1 heard nothing from the coordinator on node 0 for 30 s and stopped its ranks: the network between the two was broken, or one of"
    " the machines froze"
)


def stopped_itself(code: int | None = None) -> RankState:
    return RankState(1, True, RankExit(1, code, None if code is not None else "SIGKILL", ordered=True))


def test_a_node_that_heard_nothing_and_stopped_its_ranks_is_lost_though_it_is_back_in_time() -> None:
    story = failed_before(started(restart=RestartPolicy(3, 10)))
    story.loses(1).waits(3).hears(1, hello(1, known=1, ranks=(stopped_itself(),)))
    assert (story.gang.phase, story.gang.stop_reason) == (Phase.STOPPING, UNHEARD)
    story.exits(**killed(0)).hears(0, Stopped(1))
    failure = story.report.failure
    assert (story.report.state, failure.message, failure.cause, failure.node) == (State.BACKING_OFF, UNHEARD, Cause.NODE_LOST, 1)
    assert (story.report.restarts_counted, story.report.history[0].counts) == (2, True)
    assert {order.attempt for _, order in story.waits(10).orders if isinstance(order, Start)} == {2}


@pytest.mark.parametrize("away", [True, False], ids=["its hello first", "no connection closed"])
def test_ranks_that_are_stopped_without_an_order_are_a_loss_whenever_that_is_heard(away: bool) -> None:
    story = started(restart=RestartPolicy(3, 10))
    if away:
        story.loses(1).waits(3).hears(1, hello(1, attempt=1, ranks=(RankState(1, True),)))
    story.exits(**killed(1)).hears(1, Stopped(1))
    assert (story.gang.phase, story.gang.stop_reason) == (Phase.STOPPING, UNHEARD)


def test_a_node_that_stopped_its_ranks_unheard_is_named_and_not_the_ranks_that_lost_them() -> None:
    story = failed_before(started(restart=RestartPolicy(3, 10))).loses(1).exits(0, 1, last_lines=LOST_PEER)
    story.hears(1, hello(1, known=1, ranks=(stopped_itself(),))).hears(0, Stopped(1))
    assert (story.report.failure.message, story.report.failure.rank) == (UNHEARD, None)


def test_every_node_that_was_frozen_and_stopped_its_ranks_is_one_failure() -> None:
    story = failed_before(started(restart=RestartPolicy(3, 10)))
    for node in (0, 1):
        story.exits(**killed(node)).hears(node, Stopped(1))
    assert (story.report.state, story.report.restarts_counted) == (State.BACKING_OFF, 2)


def test_a_node_that_was_told_to_go_while_it_was_away_saves_and_is_not_lost() -> None:
    story = started().loses(1).waits(3)
    story.hears(1, replace(hello(1, attempt=1, ranks=(stopped_itself(code=75),)), leaving=True))
    assert (story.gang.stopping, story.gang.stop_reason) == (StopMode.SAVE, "a node was asked to stop")


def test_a_node_all_of_whose_ranks_are_done_is_not_told_to_start_again() -> None:
    story = started().exits(1).hears(1, Stopped(1)).loses(1)
    assert story.hears(1, hello(1, known=1, ranks=(RankState(1, True, RankExit(1, 0, None, ordered=False)),))).orders == []
    assert story.loses(1).hears(1, hello(1, instance="another")).orders == []
    assert story.exits(0).report.state is State.COMPLETE


def test_a_node_that_never_got_its_order_to_start_gets_it_again() -> None:
    story = Story(make_run()).hears(0, hello(0)).hears(1, hello(1))
    story.loses(1).hears(1, hello(1))
    assert story.orders == [(1, Start(1, 0, "127.0.0.1", 29500))]


def test_ranks_of_an_older_attempt_are_stopped_before_the_next_one_starts() -> None:
    story = Story(make_run()).hears(0, hello(0)).hears(1, hello(1, attempt=4))
    assert [(node, order.attempt) for node, order in story.orders if isinstance(order, Stop)] == [(1, 4)]
    story.hears(1, Stopped(4))
    assert {order.attempt for _, order in story.orders if isinstance(order, Start)} == {5}


def test_words_of_another_attempt_change_nothing() -> None:
    story = started(attempt=3)
    before = story.gang
    story.hears(1, Exited(2, RankExit(1, 1, None, False)), Started(2), Stopped(2))
    assert story.gang == before


def test_a_node_cannot_speak_for_the_ranks_of_another() -> None:
    story = started()
    before = story.gang
    story.hears(1, Exited(1, RankExit(0, 1, None, False)), Reported(1, {"event": "end", "rank": 0, "result": {"adapter": "/evil"}}))
    assert story.gang == before


def test_a_node_that_leaves_lets_all_ranks_save_and_the_gang_waits_for_its_successor() -> None:
    story = started(restart=RestartPolicy(0, 0)).hears(1, Leaving())
    assert [order.mode for _, order in story.orders if isinstance(order, Stop)] == [StopMode.SAVE, StopMode.SAVE]
    for rank in (0, 1):
        story.exits(rank, 75, ordered=True).hears(rank, Stopped(1))
    assert (story.report.state, story.report.message, story.records) == (State.WAITING, "waiting for node 1 of 2", ["begin", "Stopped"])
    story.loses(1).hears(1, hello(1, instance="successor"))
    assert (story.gang.attempt, story.report.restarts, story.report.restarts_counted) == (2, 1, 0)


def test_the_report_has_what_rank_zero_last_said() -> None:
    story = started().reports(
        0, Activity(0, "Step"), Step(0, 5, 9, metrics={"loss": "2.0", "lr": "1"}), Evaluate(0, 5, {"evalLoss": "2.2"})
    )
    story.reports(0, Step(0, 6, 9, estimated_remaining_seconds=4, metrics={"loss": "1.9"})).reports(1, Step(1, 3))
    trainer = story.report.trainer
    assert (trainer.activity, trainer.step, trainer.total_steps, trainer.estimated_remaining_seconds) == ("Step", 6, 9, 4)
    assert {metric.name: metric.value for metric in trainer.metrics} == {"loss": "1.9", "lr": "1", "evalLoss": "2.2"}


def test_the_report_has_the_last_commit_and_when_it_was_heard() -> None:
    story = started().reports(0, Checkpoint(0, 5, "/c/step-5.a1", 10))
    assert story.report.checkpoint.time == "1970-01-01T00:16:40Z"
    assert (story.report.checkpoint.step, story.report.checkpoint.path) == (5, "/c/step-5.a1")


def record(attempt: int, uid: str = "uid-1", restarts: int = 0, outcome: str | None = None, **more: Any) -> AttemptRecord:
    return AttemptRecord(attempt, uid, restarts, "2026-01-01T00:00:00Z", outcome, **more)


@pytest.mark.parametrize(("outcome", "restarts"), [(None, 1), ("Stopped", 0)])
def test_an_attempt_that_ended_with_its_coordinator_counts_unless_it_was_asked_to(outcome: str | None, restarts: int) -> None:
    run = make_run(restart=RestartPolicy(3, 0))
    story = Story(run, resume_gang(run, [record(4, outcome=outcome)], None, 1000.0)).hears(0, hello(0)).hears(1, hello(1))
    assert (story.gang.attempt, story.report.restarts) == (5, restarts)


def test_a_coordinator_that_keeps_dying_is_not_tried_for_ever() -> None:
    run = make_run(restart=RestartPolicy(1, 0))
    story = Story(run, resume_gang(run, [record(1), record(2, restarts=1, budget=Budget(1, 1))], None, 1000.0)).decide()
    assert (story.report.state, story.records) == (State.FAILED, ["end"])
    assert "ended without a report" in story.report.message


def test_a_job_that_has_ended_is_never_started_again() -> None:
    story = started().exits(0).exits(1)
    end = end_record(story.gang, story.run, "2026-01-01T00:00:00Z")
    again = Story(story.run, resume_gang(story.run, [record(1)], end, 2000.0)).hears(0, hello(0)).hears(1, hello(1))
    assert (again.records, again.report.state) == ([], State.COMPLETE)
    assert again.orders == [(1, Finish(State.COMPLETE, "all ranks are done"))]


def test_another_job_of_the_same_name_starts_anew_under_a_larger_attempt_number() -> None:
    story = started().exits(0).exits(1)
    end = replace(end_record(story.gang, story.run, "2026-01-01T00:00:00Z"), job_uid="earlier")
    gang = resume_gang(story.run, [record(1, uid="earlier", restarts=2)], end, 2000.0)
    again = Story(story.run, gang).hears(0, hello(0)).hears(1, hello(1))
    assert (again.gang.attempt, again.report.restarts) == (2, 0)


@pytest.mark.parametrize(("attempts", "expected"), [([], 8), ([record(3, outcome="Stopped")], 8), ([record(9, outcome="Stopped")], 10)])
def test_an_attempt_has_a_number_above_those_of_every_node_s_volume(attempts: list[AttemptRecord], expected: int) -> None:
    run = make_run(attempts_before=7)
    story = Story(run, resume_gang(run, attempts, None, 1000.0)).hears(0, hello(0)).hears(1, hello(1))
    assert (story.gang.attempt, story.report.restarts) == (expected, 0)
