"""Pods that Kubernetes should have made, or ended, by now: who is to be asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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


def test_a_controller_that_has_not_seen_the_stateful_set_is_named() -> None:
    metadata = {**(running().stateful_set or {})["metadata"], "generation": 3}
    observed = missing(metadata=metadata, status={"observedGeneration": 2})
    assert "1 of 2 pods created: Kubernetes' StatefulSet controller" in condition(later(observed), "PodsScheduled")[2]
    answer = why(after(observed, later(observed)), (), NOW + OVERDUE_SECONDS)
    assert "kube-controller-manager" in answer.summary
    assert answer.next[0].command == "kubectl get pods -n kube-system"


def test_a_pod_that_a_working_controller_does_not_make_is_looked_for_by_its_name() -> None:
    metadata = {**(running().stateful_set or {})["metadata"], "generation": 3}
    observed = missing(metadata=metadata, status={"observedGeneration": 3})
    answer = why(after(observed, later(observed)), (), NOW + OVERDUE_SECONDS)
    assert "Kubernetes does not say why x-1 is not created" in answer.summary
    assert answer.next[0].command == "kubectl get pod x-1 -n ns --show-labels"


def test_a_finalizer_that_keeps_a_pod_is_named_with_the_command_that_takes_it_off() -> None:
    observed = ending(("example.com/keeps",))
    plan = later(observed)
    assert condition(plan, "RanksReady")[1] == "PodNotEnded"
    answer = why(after(observed, plan), (), NOW + OVERDUE_SECONDS)
    assert f"x-1 should have ended at {ENDED}, and finalizer example.com/keeps keeps it" in answer.summary
    assert answer.next[0].command == """kubectl patch pod x-1 -n ns --type merge -p '{"metadata":{"finalizers":null}}'"""


def test_a_kubelet_that_does_not_end_a_pod_is_named() -> None:
    answer = why(after(ending(), later(ending())), (), NOW + OVERDUE_SECONDS)
    assert "the kubelet of Node node-1 has not confirmed that it did" in answer.summary
    assert answer.next[0].command == "kubectl describe node node-1"
    assert condition(reconcile(ending(), None, CONTEXT, NOW), "RanksReady")[1] == "WaitingForReport"


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
