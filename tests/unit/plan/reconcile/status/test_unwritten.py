"""A job's record that can't be written: a state of its own, with the failure that waits for it, which no later report takes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.plan.pages.why import answer_page, why
from lockstep.plan.reconcile.measures import gauges, with_failures_known
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep_gang.contract.report import UNREPORTED, Cause, Failure, Report, Restart, State, Unwritten, parse_report, report_body
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, condition, report, settled

TIME = "2026-01-01T00:00:00Z"
DEAD = Failure("rank 1 on node 1 exited with 1: OSError: [Errno 5] Input/output error", rank=1, node=1, cause=Cause.STORAGE)
LOST = Failure(f"{UNREPORTED.format(1)}: node 0's agent was killed", node=0, cause=Cause.NODE_LOST)
PROBLEM = "cannot write the job's record under /workspace/runs/x/gang (Input/output error)"


def restarts(failure: Failure) -> tuple[Restart, ...]:
    return (Restart(1, TIME, failure, 4),)


def unwritten(problem: str = PROBLEM) -> Report:
    return report(ready=0, unwritten=Unwritten(problem, TIME), failure=DEAD, history=restarts(DEAD)).report


@pytest.mark.parametrize(
    ("problem", "command"),
    [
        (PROBLEM, "kubectl get events -n ns --field-selector involvedObject.name=x-0"),
        ("the volume with /workspace/runs/x/gang doesn't answer", "kubectl get events -n ns --field-selector involvedObject.name=x-0"),
        ("cannot write the job's record (No space left on device)", "kubectl exec x-0 -n ns -- df -h /workspace"),
        ("cannot write the job's record (no inodes are left)", "kubectl exec x-0 -n ns -- df -i /workspace"),
    ],
)
def test_a_gang_that_cannot_write_its_record_is_a_state_of_its_own(problem: str, command: str) -> None:
    before = settled(report())
    sent = parse_report(report_body(unwritten(problem)))
    plan = reconcile(before, replace(report(), report=sent), CONTEXT, NOW + 5)
    assert condition(plan, "Progressing")[:2] == ("False", "RecordUnwritten")
    assert [event.reason for event in plan.events if event.type == "Warning"] == ["RecordUnwritten", "Restarting"]
    assert plan.status is not None and plan.status["failure"]["cause"] == "Storage"
    assert gauges(plan.status, NOW + 5, 0.0)["record_unwritten"] == 1.0
    answer = why(after(before, plan), (), NOW + 6)
    assert (answer.state, answer.is_well, answer.next[0].command) == ("RecordUnwritten", False, command)
    assert problem in answer.summary and TIME in answer.summary and "rank 1 on node 1" in answer_page(answer)


def test_it_ends_by_itself_and_is_told_once() -> None:
    before = settled(report())
    held = after(before, reconcile(before, replace(report(), report=unwritten()), CONTEXT, NOW + 5))
    plan = reconcile(held, replace(report(), report=replace(report().report, restarts=1, history=restarts(DEAD))), CONTEXT, NOW + 20)
    assert condition(plan, "Progressing")[:2] == ("True", "Running")
    assert "Restarting" not in [event.reason for event in plan.events]


@pytest.mark.parametrize("state", [State.BACKING_OFF, State.FAILED])
def test_a_coordinator_that_finds_no_record_does_not_take_back_the_failure_that_was_reported(state: State) -> None:
    before = settled(report())
    held = after(before, reconcile(before, replace(report(), report=unwritten()), CONTEXT, NOW + 5))
    later = replace(report(state).report, message=LOST.message, failure=LOST, history=restarts(LOST))
    plan = reconcile(held, replace(report(), report=later), CONTEXT, NOW + 20)
    assert [(entry["cause"], entry["message"]) for entry in plan.status["restartHistory"]] == [("Storage", DEAD.message)]
    assert (plan.status["failure"]["cause"], plan.status["failure"]["rank"]) == ("Storage", 1)
    assert state is State.BACKING_OFF or condition(plan, "Failed")[2] == DEAD.message
    again = with_failures_known(plan.status, later)
    assert again.failure is not None and again.failure.cause is Cause.STORAGE


def test_an_attempt_of_which_nothing_was_reported_stays_without_a_report() -> None:
    later = replace(report(State.BACKING_OFF).report, failure=LOST, history=restarts(LOST))
    assert with_failures_known({}, later) == later
    told = [{"attempt": 1, "time": TIME, "cause": "NodeLost", "message": LOST.message, "lostSteps": 4, "node": 0}]
    assert with_failures_known({"restartHistory": told}, later) == later
