"""A start whose node 0 never runs: the operator gives it up, since no coordinator is there to. No cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.conditions import timestamp
from lockstep.plan.reconcile.reconcile import reconcile
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, PROFILE, after, condition, fresh, pod, replicas, report, running, unplaced
from unit.plan.reconcile.test_stop import status

PULLING = {"phase": "Pending", "containerStatuses": [{"name": "trainer", "restartCount": 0,
    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]}  # fmt: skip

NO_ROOM = {"kind": "Pod", "spec": {"containers": []}, "status": unplaced("0/2 nodes are available")}


def starting(node_0: Any, *others: Any, **spec: Any) -> Observed:
    """A start 600 s ago of which `node_0` is the first pod."""
    made = [{**item, "metadata": {**item["metadata"], "creationTimestamp": timestamp(NOW)}} for item in (node_0, *others)]
    return replace(running(startTimeoutSeconds=600, **spec), pods=tuple(made))


@pytest.mark.parametrize("spec", [{}, {"type": "Interactive", "script": None}], ids=["Batch", "Interactive"])
def test_a_start_whose_node_0_never_runs_fails_and_lets_the_other_nodes_go(spec: dict[str, Any]) -> None:
    observed = starting(pod(0, status=PULLING), pod(1), **spec)
    before = reconcile(observed, None, CONTEXT, NOW + 590)
    assert condition(before, "Failed")[0] == "False"
    assert (before.again_seconds or 0) <= 10
    plan = reconcile(observed, None, CONTEXT, NOW + 601)
    assert replicas(plan) == [0]
    assert condition(plan, "Failed")[:2] == ("True", "StartTimeout")
    assert "node 0 did not start within the 600 s of startTimeoutSeconds: pod x-0" in condition(plan, "Failed")[2]
    assert status(plan)["failure"]["cause"] == "Setup"
    again = reconcile(after(observed, plan), None, CONTEXT, NOW + 700)
    assert condition(again if again.status else after(observed, plan), "Failed")[:2] == ("True", "StartTimeout")


def test_a_job_without_any_node_may_wait_for_ever() -> None:
    queued = {"kind": "Pod", "spec": {"containers": []}, "status": {"phase": "Pending"}}
    observed = starting({**pod(0), **queued}, {**pod(1), **queued})
    assert condition(reconcile(observed, None, CONTEXT, NOW + 10**6), "Failed")[0] == "False"


def test_a_node_0_that_ran_before_is_its_coordinator_s_to_judge() -> None:
    crashed = {
        "phase": "Running",
        "containerStatuses": [{"name": "trainer", "restartCount": 1, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}],
    }
    observed = starting(pod(0, status=crashed), pod(1))
    assert condition(reconcile(observed, None, CONTEXT, NOW + 10**6), "Failed")[0] == "False"
    assert condition(reconcile(starting(pod(0), pod(1)), report(), CONTEXT, NOW + 10**6), "Failed")[0] == "False"


def test_time_in_a_queue_is_not_taken_for_a_start() -> None:
    """The clock begins when the last pod gets a node: waiting for room is no failure, whichever pod waits."""
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(NOW + 7200)}
    early = {**placed, "lastTransitionTime": timestamp(NOW)}
    first, last = pod(0, status={**PULLING, "conditions": [early]}), pod(1, status={**PULLING, "conditions": [placed]})
    observed = starting(first, last)
    assert condition(reconcile(observed, None, CONTEXT, NOW + 7201), "Failed")[0] == "False"
    assert condition(reconcile(observed, None, CONTEXT, NOW + 7200 + 601), "Failed")[:2] == ("True", "StartTimeout")
    for waiting in ({"kind": "Pod", "spec": {"containers": []}, "status": {"phase": "Pending"}}, NO_ROOM):
        for pods in ((first, {**pod(1), **waiting}), ({**pod(0), **waiting}, last)):
            assert condition(reconcile(starting(*pods), None, CONTEXT, NOW + 10**6), "Failed")[0] == "False"


def test_a_claim_that_isnt_bound_is_no_lack_of_room() -> None:
    """The start's time counts, and the nodes that are there stay held until it is over."""
    unbound = {"kind": "Pod", "spec": {"containers": []}, "status": unplaced("pod has unbound immediate PersistentVolumeClaims")}
    observed = starting(pod(0, status=PULLING), {**pod(1), **unbound})
    assert "placement" not in status(reconcile(observed, None, CONTEXT, NOW + 590))
    assert condition(reconcile(observed, None, CONTEXT, NOW + 601), "Failed")[:2] == ("True", "StartTimeout")


def test_a_pod_that_its_kubelet_would_not_have_is_waited_for_until_it_is_replaced() -> None:
    refused = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices present"}
    assert condition(reconcile(starting(pod(0, status=refused), pod(1)), None, CONTEXT, NOW + 10**6), "Failed")[0] == "False"


@pytest.mark.parametrize(("operator", "accepted"), [("registry.example.com/team/lockstep-operator:0.1.0", True), ("agent:1", False)])
def test_a_job_for_which_nobody_names_an_image_runs_the_trainer_s_from_beside_the_operator_s(operator: str, accepted: bool) -> None:
    observed = replace(fresh(), profiles=({**PROFILE, "spec": {"platform": "Kubernetes"}},))
    plan = reconcile(observed, None, replace(CONTEXT, agent_image=operator), NOW)
    assert condition(plan, "Accepted")[:2] == (("True", "Accepted") if accepted else ("False", "NoImage"))
    images = [item["spec"]["template"]["spec"]["containers"][0]["image"] for item in plan.create if item["kind"] == "StatefulSet"]
    assert images == (["registry.example.com/team/lockstep-trainer:0.1.0"] if accepted else [])
