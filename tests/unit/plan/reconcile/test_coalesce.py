"""Changes of a status that wait for what follows, and those that don't. No cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep.platforms.operator.memory.queue import DelayedWrites
from lockstep_gang.contract.report import State
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, condition, fresh, pod, report, running, settled, waiting

SETTLE_SECONDS = 2.0

QUEUED = {"spec": {"containers": []}, "status": {"phase": "Pending"}}


def created() -> Observed:
    """A job whose first status is written, and whose pods are not there yet."""
    return after(replace(running(), pods=()), plan_of(replace(running(), pods=())))


def plan_of(observed: Observed, *received: object) -> Plan:
    return reconcile(observed, *(received or (None,)), CONTEXT, NOW)  # type: ignore[arg-type]


def test_the_first_status_of_a_job_is_written_at_once() -> None:
    plan = plan_of(fresh())
    assert plan.status is not None
    assert not plan.passing


@pytest.mark.parametrize(
    "pods", [(pod(0, **QUEUED),), (pod(0), pod(1, **QUEUED)), (pod(0), pod(1, status={"phase": "Pending"})), (pod(0), pod(1))]
)
def test_how_far_a_start_has_come_may_wait(pods: tuple[dict[str, object], ...]) -> None:
    plan = plan_of(replace(created(), pods=pods))
    assert plan.status is not None
    assert plan.passing


def test_a_trouble_of_a_start_is_written_at_once() -> None:
    plan = plan_of(replace(created(), pods=(waiting("ImagePullBackOff", "no such image"), pod(1))))
    assert condition(plan, "Progressing")[1] == "ImagePullFailed"
    assert not plan.passing


def test_what_the_gang_reports_is_written_at_once() -> None:
    started = replace(created(), pods=(pod(0), pod(1)))
    assert not plan_of(started, report()).passing
    assert not plan_of(started, report(State.WAITING, ready=0)).passing
    assert not plan_of(started, report(State.FAILED, ready=0)).passing


def test_a_stop_is_written_at_once_and_a_resumption_may_wait() -> None:
    stopping = settled(report(), suspend=True)
    assert not plan_of(stopping, report()).passing
    suspended = after(fresh(suspend=True), plan_of(fresh(suspend=True)))
    resumed = replace(fresh(), job={**fresh().job, "status": suspended.status})
    assert condition(plan_of(resumed), "Suspended")[0] == "False"
    assert plan_of(resumed).passing


def test_an_end_takes_one_write() -> None:
    done = report(State.COMPLETE, ready=0, log=("done",))
    observed = settled(report())
    plan = plan_of(observed, done)
    assert (plan.passing, plan.status["nodes"], condition(plan, "Complete")[0]) == (False, 0, "True")
    ended = after(observed, plan)
    for pods in (ended.pods, ended.pods[:1], ()):
        assert reconcile(replace(ended, pods=pods), done, CONTEXT, NOW + 30.7).status is None


def test_a_change_waits_only_so_long_and_the_next_one_waits_anew() -> None:
    now = [100.0]
    settling = DelayedWrites(lambda: now[0])
    assert settling.left("a") == SETTLE_SECONDS
    now[0] += SETTLE_SECONDS - 0.5
    assert (settling.left("a"), settling.left("b")) == (0.5, SETTLE_SECONDS)
    now[0] += 0.5
    assert settling.left("a") == 0
    settling.settled("a")
    assert settling.left("a") == SETTLE_SECONDS
