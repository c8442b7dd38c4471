"""Deadline and time to live: state transitions of one job. No cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.job import TrainingJobSpec
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.clocks import without_operator
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep_gang.contract.report import Failure, State
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, asked, condition, gone, pod, replicas, report, settled
from unit.plan.reconcile.test_stop import SAVED, going, status, stopped_report


def late(**spec: Any) -> Observed:
    return settled(report(), activeDeadlineSeconds=60, **spec)


def test_a_deadline_saves_and_stops_then_fails_the_job() -> None:
    observed = late()
    assert status_active(observed) == {"since": "2027-01-15T08:00:00Z", "earlierSeconds": 0}
    plan = reconcile(observed, report(), CONTEXT, NOW + 60)
    assert replicas(plan) == [0]
    assert condition(plan, "Progressing")[:2] == ("False", "DeadlineExceeded")
    assert condition(plan, "Failed")[0] == "False"
    stopped = replace(after(observed, plan), pods=())
    ended = reconcile(stopped, stopped_report(), CONTEXT, NOW + 80)
    assert condition(ended, "Failed") == (
        "True", "DeadlineExceeded", f"pods of the job were on nodes for the 60 s of spec.activeDeadlineSeconds; {SAVED.message}",
    )  # fmt: skip
    assert condition(ended, "Progressing")[:2] == ("False", "Failed")
    assert status(ended)["active"] == {"earlierSeconds": 80}
    after_end = after(stopped, ended)
    again = reconcile(after_end, None, CONTEXT, NOW + 500)
    assert (again.create, again.apply, again.status) == ((), (), None)


def status_active(observed: Observed) -> Any:
    return observed.status["active"]


def test_the_deadline_is_noticed_without_an_event() -> None:
    observed = late()
    assert reconcile(observed, report(), CONTEXT, NOW + 20).again_seconds == pytest.approx(40.1)


def test_suspended_time_doesnt_count_and_earlier_time_does() -> None:
    observed = going(asked(late(), suspend=True))
    slept = after(gone(observed), reconcile(gone(observed), stopped_report(), CONTEXT, NOW + 40))
    assert status_active(slept) == {"earlierSeconds": 40}
    woken = asked(slept, suspend=False)
    started = after(woken, reconcile(woken, None, CONTEXT, NOW + 1000))
    assert status_active(started) == {"earlierSeconds": 40}
    running = replace(started, pods=(pod(0), pod(1)))
    running = after(running, reconcile(running, report(), CONTEXT, NOW + 1010))
    assert replicas(reconcile(running, report(), CONTEXT, NOW + 1029)) == []
    assert replicas(reconcile(running, report(), CONTEXT, NOW + 1030)) == [0]


def test_pods_that_wait_for_a_node_dont_count() -> None:
    observed = late()
    waiting = {**pod(0), "spec": {"containers": []}}
    plan = reconcile(replace(observed, pods=(waiting, waiting), job={**observed.job, "status": {}}), None, CONTEXT, NOW)
    assert "active" not in status(plan)


def test_restarts_count() -> None:
    observed = late()
    restarted = after(observed, reconcile(observed, report(State.BACKING_OFF, ready=0), CONTEXT, NOW + 30))
    assert replicas(reconcile(restarted, report(), CONTEXT, NOW + 60)) == [0]


def test_a_deadline_that_is_raised_before_the_stop_is_over_lets_the_job_go_on() -> None:
    observed = late()
    plan = reconcile(observed, report(), CONTEXT, NOW + 60)
    stopped = asked(replace(after(observed, plan), pods=()), activeDeadlineSeconds=3600)
    assert replicas(reconcile(stopped, stopped_report(), CONTEXT, NOW + 80)) == [2]


def test_a_retry_counts_from_zero() -> None:
    observed = asked(late(), restart={"retry": 1})
    plan = reconcile(observed, report(), CONTEXT, NOW + 70)
    assert replicas(plan) == []
    assert status(plan)["active"] == {"retry": 1, "since": "2027-01-15T08:01:10Z", "earlierSeconds": 0}


def test_a_retry_lets_a_job_go_on_that_failed_by_its_deadline() -> None:
    observed = late()
    stopped = replace(after(observed, reconcile(observed, report(), CONTEXT, NOW + 60)), pods=())
    failed = after(stopped, reconcile(stopped, stopped_report(), CONTEXT, NOW + 80))
    retried = asked(failed, restart={"retry": 1})
    plan = reconcile(retried, None, CONTEXT, NOW + 100)
    assert replicas(plan) == [2]
    assert condition(plan, "Failed")[0] == "False"
    assert "active" not in status(plan) or status(plan)["active"].get("earlierSeconds") == 0


def test_a_job_that_ended_well_at_its_deadline_is_complete() -> None:
    plan = reconcile(late(), report(State.COMPLETE, ready=0), CONTEXT, NOW + 61)
    assert (condition(plan, "Complete")[0], condition(plan, "Failed")[0]) == ("True", "False")


@pytest.mark.parametrize("state", [State.COMPLETE, State.FAILED])
def test_a_finished_job_is_deleted_when_its_time_to_live_is_over(state: State) -> None:
    observed = settled(report(), ttlSecondsAfterFinished=30)
    end = report(state, ready=0, failure=Failure("no") if state is State.FAILED else None)
    ended = after(observed, reconcile(observed, end, CONTEXT, NOW))
    waits = reconcile(gone(ended), end, CONTEXT, NOW + 20)
    assert waits.delete == ()
    assert waits.again_seconds == pytest.approx(10)
    over = reconcile(gone(ended), end, CONTEXT, NOW + 30)
    assert [(item["kind"], item["metadata"]["name"], item["metadata"]["uid"]) for item in over.delete] == [
        ("TrainingJob", "x", ended.uid),
    ]  # fmt: skip
    assert (over.create, over.apply, over.claims, over.status) == ((), (), (), None)


def test_a_finished_job_stays_while_its_pods_go() -> None:
    observed = settled(report(), ttlSecondsAfterFinished=0)
    ended = after(observed, reconcile(observed, report(State.COMPLETE, ready=0), CONTEXT, NOW))
    assert reconcile(ended, None, CONTEXT, NOW + 5).delete == ()
    assert len(reconcile(gone(ended), None, CONTEXT, NOW + 5).delete) == 1


def test_without_a_time_to_live_a_job_stays() -> None:
    observed = settled(report())
    ended = after(observed, reconcile(observed, report(State.COMPLETE, ready=0), CONTEXT, NOW))
    assert reconcile(gone(ended), None, CONTEXT, NOW + 10_000_000).delete == ()


def test_a_suspended_job_is_not_finished() -> None:
    observed = gone(going(asked(settled(report(), ttlSecondsAfterFinished=0), suspend=True)))
    assert reconcile(observed, None, CONTEXT, NOW + 5).delete == ()


def test_what_only_the_operator_carries_out_is_known() -> None:
    spec = {"script": {"path": "a.py"}, "activeDeadlineSeconds": 5, "ttlSecondsAfterFinished": 0, "queueName": "q"}
    assert without_operator(TrainingJobSpec.model_validate(spec)) == ["spec.activeDeadlineSeconds", "spec.ttlSecondsAfterFinished"]
    restart = {"maxRestarts": 1, "lostNodeSeconds": 0, "holdOnFailureSeconds": 60}
    of_restarts = ["spec.restart.lostNodeSeconds", "spec.restart.holdOnFailureSeconds"]
    assert without_operator(TrainingJobSpec.model_validate({"script": {"path": "a.py"}, "restart": restart})) == of_restarts
    assert without_operator(TrainingJobSpec.model_validate({"script": {"path": "a.py"}})) == []
