"""Nodes that the cluster takes away: what the operator's facts make of a loss, before and after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.contract.messages import Checkpoint, Leaving, Start, Started, Step, Stopped
from lockstep_gang.contract.reply import Fact, FactType
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import ReportTarget, RestartPolicy
from lockstep_gang.contract.times import stamp
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.coordinator.owner import Ownership, Replaced
from lockstep_gang.coordinator.records import Records
from lockstep_gang.lifecycle.budget import TOLD_TO_END
from lockstep_gang.lifecycle.history import begun_records, closed_records, corrected_records, end_record, resume_gang
from lockstep_gang.lifecycle.losses import waits_for_facts, with_facts
from unit.gang.cases import make_run
from unit.gang.story import Story, hello, started

REPORT = ReportTarget("https://here/v1/report", "", "")
NOTHING_SPARE = {"restart": RestartPolicy(0, 0), "report": REPORT}


def fact(kind: FactType = FactType.NODE_LOST, node: int = 1, at: float = 1000.0, pod_uid: str = "pod-1", **changes: Any) -> Fact:
    return replace(Fact(kind, node, f"x-{node}", "NotReady", "Node b is NotReady", pod_uid, "b", stamp(at)), **changes)


def told(story: Story, *facts: Fact) -> Story:
    """The operator's reply comes."""
    story.gang = with_facts(story.gang, facts, story.now)
    return story.decide()


def lost(story: Story, node: int = 1) -> Story:
    """The node's connection closes and doesn't come back; the others stop."""
    story.loses(node).waits(5)
    for other in range(story.run.nodes):
        if other != node:
            story.hears(other, Stopped(story.gang.attempt))
    return story


def back(story: Story, node: int = 1) -> Story:
    return story.hears(node, hello(node, known=story.gang.attempt, instance="another"))


@pytest.mark.parametrize(
    ("kind", "cause", "word"),
    [
        (FactType.NODE_LOST, Cause.NODE_LOST, "node 1 was lost: Node b is NotReady"),
        (FactType.PREEMPTED, Cause.PREEMPTED, "node 1 was preempted: Node b is NotReady"),
        (FactType.EVICTED, Cause.NODE_LOST, "node 1 was evicted: Node b is NotReady"),
        (FactType.DELETED, Cause.NODE_LOST, "node 1 lost its pod: Node b is NotReady"),
    ],
)
@pytest.mark.parametrize("before", [True, False], ids=["told before", "told after"])
def test_what_the_cluster_did_has_its_cause_and_does_not_count(kind: FactType, cause: Cause, word: str, before: bool) -> None:
    story = started(restart=RestartPolicy(3, 0), report=REPORT).reports(0, Step(0, 40), Checkpoint(0, 40, "/c"), Step(0, 47))
    story = lost(told(story, fact(kind))) if before else told(lost(story), fact(kind))
    assert (story.report.failure.cause, story.report.failure.message, story.report.failure.node) == (cause, word, 1)
    assert (story.report.restarts_counted, story.report.state) == (0, State.BACKING_OFF)
    (entry,) = story.report.history
    assert (entry.failure.cause, entry.counts, entry.lost_steps) == (cause, False, 7)


def test_a_closed_connection_that_nobody_explains_counts() -> None:
    story = told(lost(started(restart=RestartPolicy(3, 0), report=REPORT)))
    (entry,) = story.report.history
    assert (story.report.restarts_counted, entry.counts, entry.failure.cause) == (1, True, Cause.NODE_LOST)


def test_a_fact_of_long_ago_or_of_another_node_explains_nothing() -> None:
    story = lost(started(restart=RestartPolicy(3, 0), report=REPORT))
    told(story, fact(at=story.now - 700), fact(at=story.now + 300), fact(node=0, pod_uid="pod-0"))
    assert story.report.restarts_counted == 1


def test_a_fact_explains_one_loss_only() -> None:
    story = told(lost(started(restart=RestartPolicy(3, 0), report=REPORT)), fact())
    back(story).waits(0).hears(0, Started(2)).hears(1, Started(2))
    told(lost(story), fact())
    assert [entry.counts for entry in story.report.history] == [False, True]
    assert story.report.restarts_counted == 1


def test_a_rank_that_lost_its_peer_to_a_lost_node_is_not_to_blame() -> None:
    story = started(restart=RestartPolicy(3, 0), report=REPORT)
    said = ("DistBackendError: NCCL error, unhandled system error",)
    story.exits(0, 1, last_lines=said).loses(1).hears(0, Stopped(1))
    told(story, fact())
    assert (story.report.failure.cause, story.report.failure.node, story.report.restarts_counted) == (Cause.NODE_LOST, 1, 0)


def test_with_nothing_spare_the_operator_is_asked_before_the_job_fails() -> None:
    story = lost(started(**NOTHING_SPARE))
    assert (story.report.state, waits_for_facts(story.gang)) == (State.BACKING_OFF, True)
    told(story.waits(40), fact(at=1045))
    back(story)
    assert [order.attempt for _, order in story.orders if isinstance(order, Start)] == [2, 2]


def test_with_nothing_spare_and_no_explanation_the_job_fails_a_minute_later() -> None:
    story = told(lost(started(**NOTHING_SPARE)).waits(54))
    assert story.report.state is State.BACKING_OFF
    assert told(story.waits(6)).report.state is State.FAILED


def test_an_agent_that_is_back_without_an_explanation_fails_the_job_after_seconds() -> None:
    story = back(lost(started(**NOTHING_SPARE)))
    assert story.report.state is State.BACKING_OFF
    assert story.records == ["begin", "Failed"]  # and no second start
    assert told(story.waits(10)).report.state is State.FAILED


def test_an_operator_that_never_answers_is_not_waited_for_for_ever() -> None:
    story = lost(started(**NOTHING_SPARE))
    assert story.wake_at == story.now + 300
    assert story.waits(299).report.state is State.BACKING_OFF
    assert story.waits(1).report.state is State.FAILED


def test_without_an_operator_the_job_fails_at_once() -> None:
    assert lost(started(restart=RestartPolicy(0, 0))).report.state is State.FAILED


@pytest.mark.parametrize("before", [True, False], ids=["told before", "told after"])
def test_a_preempted_node_that_got_to_save_is_remembered_and_does_not_count(before: bool) -> None:
    story = started(restart=RestartPolicy(0, 0), report=REPORT).reports(0, Step(0, 47))
    preempted = fact(FactType.PREEMPTED)
    if before:
        told(story, preempted)
    story.hears(1, Leaving()).reports(0, Checkpoint(0, 47, "/c"))
    for rank in (0, 1):
        story.hears(rank, Stopped(1))
    story.loses(1)
    if not before:
        told(story, preempted)
    (entry,) = story.report.history
    assert (entry.failure.cause, entry.counts, entry.lost_steps, story.report.restarts_counted) == (Cause.PREEMPTED, False, 0, 0)
    told(back(story), preempted)
    assert len(story.report.history) == 1
    assert story.report.restarts == 1


def test_a_node_that_somebody_told_to_go_is_no_failure() -> None:
    story = started(restart=RestartPolicy(0, 0), report=REPORT).hears(1, Leaving()).hears(0, Stopped(1)).hears(1, Stopped(1))
    assert told(story).report.history == ()


def test_a_node_that_was_told_to_go_and_comes_back_is_remembered_though_nobody_says_why() -> None:
    story = started(restart=RestartPolicy(0, 0), report=REPORT).hears(1, Leaving()).hears(0, Stopped(1)).hears(1, Stopped(1))
    (entry,) = back(story.loses(1)).report.history
    assert (story.gang.attempt, entry.attempt, entry.counts, entry.explained_by) == (2, 1, False, None)
    assert entry.failure.message == TOLD_TO_END.format(node=1)
    (explained,) = told(story, fact(FactType.DELETED, message="it was deleted by hand")).report.history
    assert (explained.failure.message, explained.counts) == ("node 1 lost its pod: it was deleted by hand", False)
    assert (story.report.restarts, story.report.restarts_counted, story.report.state) == (1, 0, State.STARTING)


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "suspended"])
def test_node_zero_that_was_told_to_go_is_remembered_only_if_the_cluster_says_that_the_job_was_not_stopped(deleted: bool) -> None:
    run = make_run(**NOTHING_SPARE)
    stopped = [replace(record, outcome="Stopped") for record in begun_records([], started(**NOTHING_SPARE).gang, run, stamp(1000.0))]
    story = told(Story(run, resume_gang(run, stopped, None, 1010.0, alive_at=1000.0)), *([fact(FactType.DELETED, 0)] if deleted else []))
    story.hears(0, hello(0, known=1, instance="new")).hears(1, hello(1, known=1))
    assert story.gang.attempt == 2
    assert [entry.failure.message for entry in story.report.history] == (["node 0 lost its pod: Node b is NotReady"] if deleted else [])


def test_a_late_explanation_gives_back_only_what_is_charged_since_the_last_new_commit() -> None:
    story = lost(started(restart=RestartPolicy(3, 0), report=REPORT))
    back(story).hears(0, Started(2)).hears(1, Started(2)).reports(0, Step(0, 9), Checkpoint(0, 9, "/c"))
    story.exits(1, 1, last_lines=("ValueError: no",)).hears(0, Stopped(2)).hears(1, Stopped(2))
    assert story.report.restarts_counted == 1  # the commit has filled the budget before
    told(story, fact())
    assert story.report.restarts_counted == 1
    assert [entry.counts for entry in story.report.history] == [False, True]


def test_the_record_is_corrected_and_the_next_coordinator_starts_from_it() -> None:
    story = started(restart=RestartPolicy(3, 0), report=REPORT)
    begun = begun_records([], story.gang, story.run, "2026-01-01T00:00:00Z")
    closed_ = closed_records(begun, "Failed", lost(story).gang)
    corrected = corrected_records(closed_, told(story, fact()).gang)
    again = resume_gang(story.run, corrected, None, story.now)
    assert (again.budget.counted, again.budget.failures, again.history[0].explained_by) == (0, 1, "pod-1")


def test_node_zero_lost_goes_on_from_the_record_and_is_explained_by_the_first_reply() -> None:
    run = make_run(**NOTHING_SPARE)
    before = Story(run).hears(0, hello(0)).hears(1, hello(1))
    records = begun_records([], before.gang, run, "2026-01-01T00:00:00Z")
    story = Story(run, resume_gang(run, records, None, 1000.0)).decide()
    story.hears(0, hello(0, instance="new")).hears(1, hello(1, known=1))
    assert (story.report.state, story.records) == (State.BACKING_OFF, [])
    told(story, fact(node=0, pod_uid="pod-0", at=950))
    assert [order.attempt for _, order in story.orders if isinstance(order, Start)] == [2, 2]
    assert story.report.history[0].failure.message == "node 0 was lost: Node b is NotReady"


def test_the_log_says_what_does_not_count() -> None:
    story = lost(started(restart=RestartPolicy(3, 0), report=REPORT))
    before = story.gang
    told(story, fact())
    assert list(log_lines(before, story.gang, story.run)) == [
        "node 1 was lost: Node b is NotReady: attempt 1 does not count toward restart.maxRestarts"
    ]


def test_why_a_node_is_not_there_yet_is_what_the_operator_said_last() -> None:
    story = Story(make_run(report=REPORT)).hears(0, hello(0))
    told(story, fact(), fact(FactType.WAITING, reason="ImagePulling", pod_uid="pod-2"))
    assert story.gang.facts.waiting(1) == "x-1 (ImagePulling)"
    assert story.gang.facts.waiting(0) is None
    assert story.report.history == ()


def test_a_coordinator_whose_pod_was_replaced_writes_nothing_over_its_successor_s_record(tmp_path: Path) -> None:
    story = started(restart=RestartPolicy(3, 0), run_dir=str(tmp_path))
    first, second = Ownership(story.run), Ownership(story.run)
    old, new = Records(str(tmp_path), first.check), Records(str(tmp_path), second.check)
    first.take()
    begun = begun_records([], story.gang, story.run, "2026-01-01T00:00:00Z")
    old.write_attempts(begun)
    second.take()
    successor = begun_records(new.attempts(), replace(story.gang, attempt=2), story.run, "2026-01-01T00:01:00Z")
    new.write_attempts(successor)
    with pytest.raises(Replaced, match=f"has taken over {tmp_path}"):
        old.write_attempts(closed_records(begun, "Failed", story.gang))
    new.write_attempts(closed_records(successor, "Failed", story.gang))
    assert [record.attempt for record in new.attempts()] == [1, 2]


# Retry


def failed(**changes: Any) -> tuple[Story, list[Any]]:
    story = started(restart=RestartPolicy(0, 0), **changes).reports(0, Step(0, 40), Checkpoint(0, 40, "/c"))
    begun = begun_records([], story.gang, story.run, "2026-01-01T00:00:00Z")
    story.exits(1, 1, last_lines=("ValueError: no",)).hears(0, Stopped(1)).hears(1, Stopped(1))
    assert story.report.state is State.FAILED
    return story, closed_records(begun, "Failed", story.gang)


def test_a_raised_retry_passes_over_the_failure_and_keeps_its_history() -> None:
    story, records = failed()
    end = end_record(story.gang, story.run, "2026-01-01T00:00:09Z")
    run = make_run(restart=RestartPolicy(0, 0, retry=1))
    again = Story(run, resume_gang(run, records, end, story.now)).hears(0, hello(0)).hears(1, hello(1))
    assert [order.attempt for _, order in again.orders if isinstance(order, Start)] == [2, 2]
    assert (again.report.restarts_counted, again.report.retry, len(again.report.history)) == (0, 1, 1)
    same = Story(story.run, resume_gang(story.run, records, end, story.now)).decide()
    assert same.report.state is State.FAILED


def test_the_budget_is_filled_once_a_retry_however_often_its_coordinator_starts() -> None:
    story, records = failed()
    end = end_record(story.gang, story.run, "2026-01-01T00:00:09Z")
    run = make_run(restart=RestartPolicy(0, 0, retry=1))
    again = Story(run, resume_gang(run, records, end, story.now)).hears(0, hello(0)).hears(1, hello(1))
    records = begun_records(records, again.gang, run, "2026-01-01T00:01:00Z")
    assert Story(run, resume_gang(run, records, end, story.now)).decide().report.state is State.FAILED


def test_a_complete_job_stays_complete_whatever_the_retry() -> None:
    story = started()
    records = begun_records([], story.gang, story.run, "2026-01-01T00:00:00Z")
    for rank in (0, 1):
        story.exits(rank)
    end = end_record(story.gang, story.run, "2026-01-01T00:00:09Z")
    run = make_run(restart=RestartPolicy(0, 0, retry=9))
    assert resume_gang(run, closed_records(records, "Complete", story.gang), end, story.now).ending is not None


@pytest.mark.parametrize("before", [True, False], ids=["told before", "told after"])
def test_a_container_that_the_kernel_killed_is_out_of_memory_and_counts(before: bool) -> None:
    story = started(restart=RestartPolicy(3, 0), report=REPORT).reports(0, Step(0, 40), Checkpoint(0, 40, "/c"), Step(0, 47))
    killed = fact(FactType.OUT_OF_MEMORY, message="the kernel killed its container at its limit of 4Gi (OOMKilled)", pod_uid="pod-1/t")
    story = lost(told(story, killed)) if before else told(lost(story), killed)
    failure = story.report.failure
    assert (failure.cause, failure.node) == (Cause.OUT_OF_MEMORY, 1)
    assert failure.message == "node 1 ran out of host memory: the kernel killed its container at its limit of 4Gi (OOMKilled)"
    assert (story.report.restarts_counted, story.report.history[-1].counts) == (1, True)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. Container trainer was using 3Gi",
            Cause.OUT_OF_MEMORY),
        ("The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 5Mi.", Cause.STORAGE),
        ("Pod ephemeral local storage usage exceeds the total limit of containers 1Gi.", Cause.STORAGE),
        ("The node had condition: [DiskPressure].", Cause.STORAGE),
        ("Pod was terminated in response to imminent node shutdown.", Cause.NODE_LOST),
    ],
)  # fmt: skip
def test_an_eviction_has_the_cause_that_the_kubelet_names(words: str, cause: Cause) -> None:
    story = lost(told(started(restart=RestartPolicy(3, 0), report=REPORT), fact(FactType.EVICTED, message=words)))
    assert (story.report.failure.cause, story.report.failure.message) == (cause, f"node 1 was evicted: {words}")
    assert story.report.restarts_counted == 0
