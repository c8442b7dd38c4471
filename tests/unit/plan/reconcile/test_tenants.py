"""Texts that the operator writes for a tenant name nothing of another one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.objects import Object, condition
from lockstep.plan.observed import Observed
from lockstep.plan.pages.why import answer_page, why
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.waiting.unscheduled import why_unscheduled
from unit.plan.reconcile.test_placing import CPU, GPU, OLD, Tenants, gathers
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, PROFILE, unplaced

SECRETS = ("board", "layoffs", "pod-of-board")


def no_room(resource: str) -> Object:
    return unplaced(f"0/3 nodes are available: 3 Insufficient {resource}.")


def world(resource: str = "nvidia.com/gpu", needs: Object = GPU, takes: str = "4", pods: int = 1, **board: Any) -> Observed:
    """alice's job waits for what a job and a Deployment of namespace board hold."""
    made = Tenants()
    made.see("TrainingCluster", "local", "", spec=PROFILE["spec"])
    made.job("board", "layoffs", **({"on": ("gpu-1",)} | board))
    labels = {"app": "layoffs", "pod-template-hash": "abc"}
    spec = {"nodeName": "gpu-2", "containers": [{"name": "c", "resources": {"requests": {resource: takes}}}]}
    for number in range(pods):
        made.see("Pod", f"pod-of-board-{number}", "board", labels=labels, spec=spec, status={"phase": "Running"})
    made.job("alice", wants=needs)
    observed = made.of("alice")
    return replace(observed, pods=tuple({**pod, "status": no_room(resource)} for pod in observed.pods))


@pytest.mark.parametrize(
    "board",
    [{}, {"on": ("gpu-1", None), "created": OLD, "placement": gathers(60.0)}, {"on": ("gpu-1", None), "conditions": ("Failed",)}],
    ids=["runs", "gathers", "has failed"],
)
def test_no_status_and_no_event_names_anything_of_another_namespace(board: dict[str, Any]) -> None:
    observed = world(**board)
    for second in range(0, 600, 60):
        plan = reconcile(observed, None, CONTEXT, NOW + second)
        text = json.dumps([plan.status, [(event.reason, event.message) for event in plan.events]])
        assert "of other namespaces hold" in text or "an earlier job" in text
        assert [secret for secret in SECRETS if secret in text] == []


def test_what_others_hold_is_counted() -> None:
    assert why_unscheduled(world()).message == (
        "node cpu-1 lacks nvidia.com/gpu; nvidia.com/gpu is in use on nodes gpu-1, gpu-2:"
        " jobs of other namespaces hold 8; pods of other namespaces hold 4"
    )


def test_pods_of_other_namespaces_that_take_little_are_not_in_the_way() -> None:
    assert "pods of other namespaces hold 1" in why_unscheduled(world("cpu", CPU, "500m", 2, wants=GPU)).message
    assert "hold" not in why_unscheduled(world("cpu", CPU, "100m", 20, wants=GPU)).message


def test_jobs_of_one_s_own_namespace_are_named_with_what_frees_their_nodes() -> None:
    made = Tenants()
    made.job("alice", "older", on=("gpu-1",))
    made.job("alice")
    observed = made.of("alice")
    observed = replace(observed, pods=tuple({**pod, "status": no_room("nvidia.com/gpu")} for pod in observed.pods))
    assert "TrainingJob alice/older holds 8 (kubectl patch tj older -n alice" in why_unscheduled(observed).message


def test_why_names_them_to_a_reader_who_may_see_their_pods() -> None:
    observed = world()
    plan = reconcile(observed, None, CONTEXT, NOW)
    assert plan.status is not None
    assert "jobs of other namespaces hold 8" in condition(plan.status, "PodsScheduled")["message"]
    pod = {
        "metadata": {"name": "layoffs-0", "namespace": "board", "labels": {"lockstep.dev/job": "layoffs"}},
        "spec": {"nodeName": "gpu-1", "containers": [{"name": "t", "resources": {"requests": GPU}}]},
    }
    seen = replace(observed, job={**observed.job, "status": plan.status}, others=(pod,))
    assert "TrainingJob board/layoffs holds 8" in answer_page(why(seen, (), NOW))


def test_what_others_hold_follows_their_pods() -> None:
    made = Tenants()
    made.job("board", "layoffs", on=("gpu-1",))
    made.job("alice")

    def held() -> str:
        observed = made.of("alice")
        waiting = replace(observed, pods=tuple({**pod, "status": no_room("nvidia.com/gpu")} for pod in observed.pods))
        return why_unscheduled(waiting).message.partition("hold ")[2]

    assert held() == "8"
    made.job("board", "layoffs", on=("gpu-1",), wants={"nvidia.com/gpu": "2"})
    assert held() == "2"
