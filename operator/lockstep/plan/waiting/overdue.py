"""Pods that Kubernetes should have made, or ended, by now and nobody says why it hasn't (pure)."""

from __future__ import annotations

from lockstep.api.names import pod_name
from lockstep.api.objects import Object, condition
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, is_terminating
from lockstep.plan.reasons import Reason
from lockstep.plan.times import age, remaining, seconds_of
from lockstep.plan.waiting.containers import NAMED_PODS
from lockstep_spec.words import listed

OVERDUE_SECONDS = 15.0
"""A controller and a kubelet that work take a second or two."""


def why_not_made(observed: Observed, now: float) -> str:
    """Return why pods of the StatefulSet are missing that the API server doesn't refuse; '' as long as they may be on their way."""
    left = _until_not_made(observed, now)
    stateful_set = observed.stateful_set
    if left is None or left > 0 or stateful_set is None:
        return ""
    if (stateful_set.get("status") or {}).get("observedGeneration", 0) < stateful_set["metadata"].get("generation", 0):
        return "Kubernetes' controller of StatefulSets has not looked at the job's for a while: does kube-controller-manager run?"
    missing = next(pod_name(observed.name, index) for index in range(observed.replicas) if observed.pod(index) is None)
    look = f"kubectl get pod {missing} -n {observed.namespace} --show-labels"
    return f"nobody says why {missing} is not made; if a pod of this name is there without the job's labels ({look}), delete it"


def why_still_there(observed: Observed, now: float) -> Notice | None:
    """Return who keeps pods whose time to end is over; None if there are none."""
    late = [pod for pod in observed.pods if is_terminating(pod) and _until_late(pod, now) <= 0]
    if not late:
        return None
    names = listed([pod["metadata"]["name"] for pod in late], NAMED_PODS)
    first = late[0]["metadata"]
    since = f"{names} should have ended at {first['deletionTimestamp']}"
    if first.get("finalizers"):
        return Notice(
            Reason.POD_NOT_ENDED, f"{since}, and finalizer {first['finalizers'][0]} keeps it: its owner takes it off, or nobody any more"
        )
    return Notice(Reason.POD_NOT_ENDED, f"{since}, and the kubelet of Node {late[0]['spec'].get('nodeName', '?')} does not say that it has")


def until_overdue_pods(observed: Observed, now: float) -> float | None:
    """Seconds until one of the two has something to say that it doesn't say yet; None: no pod is awaited."""
    waits = [_until_late(pod, now) for pod in observed.pods if is_terminating(pod)]
    waits += [left for left in [_until_not_made(observed, now)] if left is not None]
    return min((left for left in waits if left > 0), default=None)


def _until_not_made(observed: Observed, now: float) -> float | None:
    """Seconds until a missing pod is overdue; None if none is missing, or status doesn't say yet that one is."""
    known = condition(observed.status, "PodsScheduled")
    if len(observed.pods) >= observed.replicas or known.get("reason") != Reason.PODS_NOT_CREATED:
        return None
    return OVERDUE_SECONDS - age(seconds_of(known["lastTransitionTime"]), now)


def _until_late(pod: Object, now: float) -> float:
    """deletionTimestamp is the end of the grace that the pod has."""
    return remaining(seconds_of(pod["metadata"]["deletionTimestamp"]), OVERDUE_SECONDS, now)
