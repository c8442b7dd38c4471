"""Pods that Kubernetes should have made, or ended, by now: who is to be asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.objects import Object
from lockstep.plan.observed import Observed
from lockstep.plan.pages.why import why
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep.platforms.operator.memory.objects import StoredObject
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, condition, pod, running, settled

OVERDUE_SECONDS = 15.0

ENDED = "2027-01-15T08:00:00Z"  # NOW


def missing(**stateful_set: Any) -> Observed:
    """x-1 has not been made, which status says since NOW."""
    seen = running()
    changed = {**(seen.stateful_set or {}), **stateful_set}
    seen = replace(seen, pods=(pod(0),), objects={**seen.objects, ("StatefulSet", "x"): changed})
    return after(seen, reconcile(seen, None, CONTEXT, NOW))


def ending(finalizers: tuple[str, ...] = ()) -> Observed:
    last = pod(1)
    last["metadata"] |= {"deletionTimestamp": ENDED, "finalizers": list(finalizers)}
    seen = running()
    return replace(seen, pods=(pod(0), last))


def later(observed: Observed, seconds: float = OVERDUE_SECONDS) -> Plan:
    return reconcile(observed, None, CONTEXT, NOW + seconds)


def test_pods_may_take_a_moment_and_then_it_is_looked_again() -> None:
    plan = later(missing(), OVERDUE_SECONDS - 1)
    assert plan.status is None
    assert plan.again_seconds is not None
    assert plan.again_seconds <= 1


def of_generation_3(observed: int) -> Observed:
    """A missing pod, and the generation of the StatefulSet that its controller has seen."""
    metadata = {**(running().stateful_set or {})["metadata"], "generation": 3}
    return missing(metadata=metadata, status={"observedGeneration": observed})


@pytest.mark.parametrize(
    ("observed", "says", "command"),
    [
        (of_generation_3(2), "1 of 2 pods created: Kubernetes' StatefulSet controller has not looked", "kubectl get pods -n kube-system"),
        (of_generation_3(3), "Kubernetes does not say why x-1 is not created", "kubectl get pod x-1 -n ns --show-labels"),
        (ending(("example.com/keeps",)), f"x-1 should have ended at {ENDED}, and finalizer example.com/keeps keeps it",
            """kubectl patch pod x-1 -n ns --type merge -p '{"metadata":{"finalizers":null}}'"""),
        (ending(), "the kubelet of Node node-1 has not confirmed that it did", "kubectl describe node node-1"),
    ],
    ids=["the controller has not seen the set", "a working controller makes no pod", "a finalizer keeps it", "the kubelet does not end it"],
)  # fmt: skip
def test_who_keeps_a_pod_from_coming_or_going_is_named_with_what_helps(observed: Observed, says: str, command: str) -> None:
    answer = why(after(observed, later(observed)), (), NOW + OVERDUE_SECONDS)
    assert says in answer.summary
    assert answer.next[0].command == command


def test_a_pod_whose_time_to_end_is_just_over_is_waited_for() -> None:
    assert condition(reconcile(ending(), None, CONTEXT, NOW), "RanksReady")[1] == "WaitingForReport"
    assert condition(later(ending()), "RanksReady")[1] == "PodNotEnded"


def test_a_stop_that_does_not_come_to_its_end_says_what_keeps_it() -> None:
    observed = settled(suspend=True)
    observed = replace(observed, pods=ending(("example.com/keeps",)).pods)
    assert "finalizer example.com/keeps keeps it" in condition(later(observed), "Progressing")[2]


def test_finalizers_are_kept_of_what_is_being_deleted() -> None:
    def kept(**metadata: Any) -> Object:
        named = {"name": "x-1", "namespace": "ns", "uid": "u", "finalizers": ["a"] * 9}
        return StoredObject("Pod", {"metadata": named | metadata, "spec": {}, "status": {}}).item["metadata"]

    assert "finalizers" not in kept()
    assert kept(deletionTimestamp=ENDED)["finalizers"] == ["a"] * 4
