"""`restart.holdOnFailureSeconds`: how long the pods of a failed job stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep_gang.contract.report import State
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, asked, condition, replicas, report, settled

FAILED = report(State.FAILED, ready=0)


def held(**spec: object) -> Observed:
    """A job that has just failed, with a hold of ten minutes."""
    observed = settled(report(), restart={"holdOnFailureSeconds": 600}, **spec)
    return after(observed, reconcile(observed, FAILED, CONTEXT, NOW))


def sent(observed: Observed, now: float) -> list[int]:
    return replicas(reconcile(observed, None, CONTEXT, now))


def test_the_pods_of_a_failed_job_stay_as_long_as_asked_and_then_go() -> None:
    observed = held()
    assert observed.replicas == 2
    assert sent(observed, NOW + 599) == []
    assert sent(observed, NOW + 600) == [0]


def test_the_condition_says_until_when_and_how_to_end_it_sooner() -> None:
    status, reason, message = condition(held(), "Held")
    assert (status, reason) == ("True", "HoldOnFailure")
    assert "until 2027-01-15T08:10:00Z" in message
    assert message.endswith("""kubectl patch tj x -n ns --type merge -p '{"spec":{"restart":{"holdOnFailureSeconds":0}}}'""")
    assert condition(held(), "Failed")[0] == "True"
    assert condition(held(), "RanksReady")[:2] == ("False", "Finished")


def test_the_end_of_a_hold_is_not_slept_through() -> None:
    again = reconcile(held(), None, CONTEXT, NOW + 100).again_seconds
    assert again is not None
    assert 500 <= again <= 501


@pytest.mark.parametrize("change", [{"restart": {"holdOnFailureSeconds": 0}}, {"restart": {}}, {"suspend": True}])
def test_a_hold_ends_when_the_spec_says_so(change: dict[str, object]) -> None:
    assert sent(asked(held(), **change), NOW + 1) == [0]


def test_a_job_that_completed_is_not_held() -> None:
    observed = settled(report(), restart={"holdOnFailureSeconds": 600})
    done = after(observed, reconcile(observed, report(State.COMPLETE, ready=0), CONTEXT, NOW))
    assert done.replicas == 0
    assert condition(done, "Held")[:2] == ("False", "NotHeld")


def test_a_job_that_failed_for_another_reason_than_its_ranks_is_not_held() -> None:
    observed = held()
    told = [{**c, "reason": "DeadlineExceeded"} if c["type"] == "Failed" else c for c in observed.status["conditions"]]
    assert sent(replace(observed, job={**observed.job, "status": {**observed.status, "conditions": told}}), NOW + 1) == [0]


def test_pods_that_are_gone_dont_come_back_for_a_longer_hold() -> None:
    observed = held()
    gone = after(observed, reconcile(observed, None, CONTEXT, NOW + 600))
    longer = asked(gone, restart={"holdOnFailureSeconds": 6000})
    assert sent(longer, NOW + 601) == []
    assert longer.replicas == 0
