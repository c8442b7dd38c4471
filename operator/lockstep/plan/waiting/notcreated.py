"""Pods that Kubernetes refuses to create, or should have created or ended by now, with what to do about it (pure)."""

from __future__ import annotations

import re

from lockstep.api.names import pod_name
from lockstep.api.objects import Object, condition
from lockstep.api.sccs import scc_refusal
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, is_terminating
from lockstep.plan.reasons import Reason
from lockstep.plan.times import age, remaining, seconds_of
from lockstep_spec.words import listed

_PREFIX = re.compile(r"^create Pod \S+ in StatefulSet \S+ failed error: ")
_POD_SECURITY = re.compile(r'violates PodSecurity "([^":]+)[^"]*": (.*)')
_KNOWN = (
    (r"exceeded quota: (\S+), requested: (.*), used: (.*), limited: (.*)",
        "exceeded quota: {0}: a pod requests {1}, {2} is used, the limit is {3}: free some of it, or ask for a higher limit"
        " (kubectl describe quota {0} {place})"),
    (r"failed quota: (\S+): must specify (.*)",
        "quota {0} requires every pod to state {1}: state them in spec.resources, or in the cluster's resources"),
    (r'serviceaccount "([^"]+)" not found', "service account {0} does not exist: create it (kubectl create serviceaccount {0} {place})"),
    (r"no PriorityClass with name (\S+) was found",
        "podTemplate.priorityClassName is {0}, which the cluster doesn't have: name one that exists (kubectl get priorityclass)"),
    (r'RuntimeClass "([^"]+)" not found',
        "the TrainingCluster's pod.runtime_class is {0}, which the cluster doesn't have: name one that exists (kubectl get runtimeclass)"),
    (r'failed calling webhook "([^"]+)"',
        "the admission webhook {0} doesn't answer, so no pod is admitted: {refusal}: see which service should answer"
        " (kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations)"),
    (r"(?:maximum|minimum) \S+ (?:usage|limit) per|limit to request ratio",
        "{refusal}: ask for more, or request less in spec.resources, or without it in resources of the TrainingCluster"
        " (kubectl describe limitrange {place})"),
)  # fmt: skip
"""Refusals of the API server, and what is said of each."""


def why_not_created(observed: Observed) -> str | None:
    """The newest refusal of a pod (quota, admission, service account), as the StatefulSet's events tell it, and what helps."""
    stateful_set = observed.stateful_set
    if stateful_set is None:
        return None
    events = [event for event in observed.events_of(stateful_set["metadata"]["uid"]) if event.get("reason") == "FailedCreate"]
    if not events:
        return None
    account = str(stateful_set["spec"].get("template", {}).get("spec", {}).get("serviceAccountName", ""))
    return explained(str(events[0].get("message", "")), observed.namespace, account)


def explained(message: str, namespace: str, account: str = "") -> str:
    """The refusal in one sentence; in the API server's own words when it is none of the known ones."""
    refusal = _PREFIX.sub("", message)
    if match := _POD_SECURITY.search(refusal):
        return f"Pod Security level {match[1]} of namespace {namespace} forbids the pod: {match[2]}: {_security_hint(match[2], namespace)}"
    if by_scc := scc_refusal(refusal, namespace, account):
        return ": ".join(by_scc)
    for pattern, words in _KNOWN:
        if match := re.search(pattern, refusal):
            return words.format(*match.groups(), place=f"-n {namespace}", refusal=refusal)
    return refusal


def _security_hint(violations: str, namespace: str) -> str:
    if "IPC_LOCK" in violations or "runAsNonRoot" in violations:
        return (
            f"RDMA pods lock memory: an administrator allows it (kubectl label namespace {namespace} --overwrite "
            "pod-security.kubernetes.io/enforce=privileged), or the cluster says network.rdma.memlock: unlimited"
        )
    return f"remove that from podTemplate, or ask for another level (kubectl get namespace {namespace} --show-labels)"


OVERDUE_SECONDS = 15.0
"""A controller and a kubelet that work take a second or two."""


def why_not_made(observed: Observed, now: float) -> str:
    """Return why pods of the StatefulSet are missing that the API server doesn't refuse; '' as long as they may be on their way."""
    left = _until_not_made(observed, now)
    stateful_set = observed.stateful_set
    if left is None or left > 0 or stateful_set is None:
        return ""
    if (stateful_set.get("status") or {}).get("observedGeneration", 0) < stateful_set["metadata"].get("generation", 0):
        late = "Kubernetes' StatefulSet controller has not looked at the job's StatefulSet for a while"
        return f"{late}: see if kube-controller-manager runs, on OpenShift in its own namespace (kubectl get pods -n kube-system)"
    missing = next(pod_name(observed.name, index) for index in range(observed.replicas) if observed.pod(index) is None)
    helps = "see if a pod of this name exists without the job's labels, and delete it"
    look = f"kubectl get pod {missing} -n {observed.namespace} --show-labels"
    return f"Kubernetes does not say why {missing} is not created: {helps} ({look})"


def why_still_there(observed: Observed, now: float) -> Notice | None:
    """Return who keeps pods whose time to end is over; None if there are none."""
    late = [pod for pod in observed.pods if is_terminating(pod) and _until_late(pod, now) <= 0]
    if not late:
        return None
    names = listed([pod["metadata"]["name"] for pod in late])
    first, node, place = late[0]["metadata"], late[0]["spec"].get("nodeName", "?"), f"-n {observed.namespace}"
    if first.get("finalizers"):
        patch = f"""kubectl patch pod {first["name"]} {place} --type merge -p '{{"metadata":{{"finalizers":null}}}}'"""
        why = f"finalizer {first['finalizers'][0]} keeps it: its owner has to remove it; if that is no more, let the pod go ({patch})"
    else:
        give_up = f"once the machine is off, give the pod up by kubectl delete pod {first['name']} {place} --force"
        why = f"the kubelet of Node {node} has not confirmed that it did: {give_up} (kubectl describe node {node})"
    return Notice(Reason.POD_NOT_ENDED, f"{names} should have ended at {first['deletionTimestamp']}, and {why}")


def until_overdue_pods(observed: Observed, now: float) -> float | None:
    """Seconds until one of the two has something to say that it doesn't say yet; None: no pod is awaited."""
    waits = [_until_late(pod, now) for pod in observed.pods if is_terminating(pod)]
    waits += [left for left in [_until_not_made(observed, now)] if left is not None]
    return min((left for left in waits if left > 0), default=None)


def _until_not_made(observed: Observed, now: float) -> float | None:
    """Seconds until a missing pod is overdue; None if none is missing, or status doesn't say yet that one is."""
    scheduled = condition(observed.status, "PodsScheduled")
    if len(observed.pods) >= observed.replicas or scheduled.get("reason") != Reason.PODS_NOT_CREATED:
        return None
    return OVERDUE_SECONDS - age(seconds_of(scheduled["lastTransitionTime"]), now)


def _until_late(pod: Object, now: float) -> float:
    """deletionTimestamp is the end of the grace that the pod has."""
    return remaining(seconds_of(pod["metadata"]["deletionTimestamp"]), OVERDUE_SECONDS, now)
