"""status.goodput: the account in seconds, the time queued before it, and how often it is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.status import GoodputStatus
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.reconcile.measures import goodput_status
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep_gang.contract.report import Goodput, Loss, State, TrainerReport
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, report, running, settled

ALONE_SECONDS = 300

BEGAN = int(NOW) * 1000


def account(**spent: int) -> Goodput:
    """In seconds by kind."""
    milliseconds = {kind: seconds * 1000 for kind, seconds in spent.items()}
    return Goodput(BEGAN, BEGAN + sum(milliseconds.values()), milliseconds, furthest_step=1)


def with_times(observed: Observed, created: str, started: str | None, **spec: Any) -> Observed:
    job = observed.job
    metadata, status = {**job["metadata"], "creationTimestamp": created}, {**observed.status, "startTime": started}
    return replace(observed, job={**job, "metadata": metadata, "spec": {**job["spec"], **spec}, "status": status})


def status_of(received: ReceivedReport, observed: Observed | None = None) -> dict[str, Any]:
    status = goodput_status(observed or with_times(settled(), "2027-01-15T07:50:00Z", "2027-01-15T07:59:00Z"), received.report)
    found = status.to_dict()
    GoodputStatus.model_validate(found)
    return found


def test_seconds_by_kind_with_the_time_from_the_first_pods_to_the_coordinator_as_queued() -> None:
    book = replace(account(queued=5, load=10, train=60, evaluate=20, down=10, stopped=400), causes={"Hang": Loss(10_000, 80_999)})
    assert status_of(report(goodput=book)) == {
        "percentage": 80, "queuedSeconds": 65, "preflightSeconds": 0, "loadSeconds": 10, "unknownSeconds": 0, "trainSeconds": 60,
            "evaluateSeconds": 20,
        "saveSeconds": 0, "lostSeconds": 0, "downSeconds": 10, "stoppedSeconds": 400,
        "losses": [{"cause": "Hang", "seconds": 10, "gpuSeconds": 80}],
    }  # fmt: skip


def test_where_no_step_was_told_there_is_no_percentage() -> None:
    found = status_of(report(goodput=replace(account(unknown=70, down=10), furthest_step=0)))
    assert "percentage" not in found
    assert found["unknownSeconds"] == 70


def test_a_job_that_waits_in_a_queue_is_queued_since_its_creation() -> None:
    observed = with_times(settled(), "2027-01-15T07:50:00Z", "2027-01-15T07:59:00Z", queueName="team")
    assert status_of(report(goodput=account()), observed)["queuedSeconds"] == 600


def test_clocks_that_differ_bring_no_negative_seconds() -> None:
    observed = with_times(settled(), "2027-01-15T08:10:00Z", "2027-01-15T08:10:00Z")
    assert (found := status_of(report(goodput=account(load=1)), observed))["queuedSeconds"] == 0
    assert found["percentage"] == 0


def test_an_older_agent_s_report_without_an_account_leaves_what_is_known() -> None:
    observed = settled(report(goodput=account(train=9)))
    known = observed.status["goodput"]
    plan = reconcile(observed, report(State.COMPLETE, ready=0), CONTEXT, NOW)
    assert plan.status["goodput"] == known


@pytest.mark.parametrize(("seconds", "written"), [(ALONE_SECONDS - 10, False), (ALONE_SECONDS, True)])
def test_the_account_alone_is_written_seldom(seconds: int, written: bool) -> None:
    observed = after(running(), reconcile(running(), report(goodput=account(train=100)), CONTEXT, NOW))
    plan = reconcile(observed, report(goodput=account(train=100 + seconds)), CONTEXT, NOW + 20)
    assert (plan.status is not None) is written


def test_the_account_goes_with_progress_every_15_seconds() -> None:
    def said(step: int) -> ReceivedReport:
        return report(trainer=TrainerReport("Step", step, 100), goodput=account(train=step))

    observed = settled(said(1))
    assert reconcile(observed, said(9), CONTEXT, NOW + 8).status is None
    plan = reconcile(observed, said(15), CONTEXT, NOW + 15)
    assert plan.status["goodput"]["trainSeconds"] == 15
