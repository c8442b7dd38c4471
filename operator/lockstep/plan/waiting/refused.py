"""Explanations of the API server's refusals of pods, with what to do about them (pure)."""

from __future__ import annotations

import re

from lockstep.plan.observed import Observed

_PREFIX = re.compile(r"^create Pod \S+ in StatefulSet \S+ failed error: ")
_QUOTA = re.compile(r"exceeded quota: (\S+), requested: (.*), used: (.*), limited: (.*)")
_QUOTA_STATES = re.compile(r"failed quota: (\S+): must specify (.*)")
_POD_SECURITY = re.compile(r'violates PodSecurity "([^":]+)[^"]*": (.*)')
_SCC = "unable to validate against any security context constraint"
_ACCOUNT = re.compile(r'serviceaccount "([^"]+)" not found')
_PRIORITY = re.compile(r"no PriorityClass with name (\S+) was found")
_RUNTIME = re.compile(r'RuntimeClass "([^"]+)" not found')
_WEBHOOK_DOWN = re.compile(r'failed calling webhook "([^"]+)"')


def why_not_created(observed: Observed) -> str | None:
    """The newest refusal of a pod (quota, admission, service account), as the StatefulSet's events tell it, and what helps."""
    stateful_set = observed.stateful_set
    if stateful_set is None:
        return None
    events = [event for event in observed.events_of(stateful_set["metadata"]["uid"]) if event.get("reason") == "FailedCreate"]
    return explained(str(events[0].get("message", "")), observed.namespace) if events else None


def explained(message: str, namespace: str) -> str:  # noqa: PLR0911 (a table of cases reads best as one)
    """The refusal in one sentence; in the API server's own words when it is none of the known ones."""
    said = _PREFIX.sub("", message)
    place = f"-n {namespace}"
    if found := _QUOTA.search(said):
        name, requested, used, limited = found.groups()
        numbers = f"a pod asks for {requested}, used is {used}, the limit is {limited}"
        return f"exceeded quota: {name}: {numbers}: free some of it, or have it raised (kubectl describe quota {name} {place})"
    if found := _QUOTA_STATES.search(said):
        return f"quota {found[1]} wants every pod to state {found[2]}: state them in the cluster's resources"
    if found := _POD_SECURITY.search(said):
        return f"Pod Security level {found[1]} of namespace {namespace} forbids the pod: {found[2]}: {_security_hint(found[2], namespace)}"
    if _SCC in said:
        return f"no SCC that the job's service account may use admits the pod: {_scc_hint(said, namespace)}"
    if found := _ACCOUNT.search(said):
        return f"service account {found[1]} does not exist: kubectl create serviceaccount {found[1]} {place}"
    if found := _PRIORITY.search(said):
        return (
            f"podTemplate.priorityClassName is {found[1]}, which the cluster doesn't have: kubectl get priorityclass lists those there are"
        )
    if found := _RUNTIME.search(said):
        return f"the TrainingCluster's pod.runtime_class is {found[1]}, which the cluster doesn't have: kubectl get runtimeclass lists those there are"
    if found := _WEBHOOK_DOWN.search(said):
        return f"the admission webhook {found[1]} doesn't answer, so that no pod gets in: {said}"
    return said


def _security_hint(violations: str, namespace: str) -> str:
    if "IPC_LOCK" in violations or "runAsNonRoot" in violations:
        return (
            f"RDMA pods lock memory: an administrator allows it (kubectl label namespace {namespace} --overwrite "
            "pod-security.kubernetes.io/enforce=privileged), or the cluster says network.rdma.memlock: unlimited"
        )
    return f"take that out of podTemplate, or have the level changed (kubectl get namespace {namespace} --show-labels)"


def _scc_hint(said: str, namespace: str) -> str:
    violations = "; ".join(dict.fromkeys(re.findall(r"Invalid value: [^,\]]+", said))) or said
    if "IPC_LOCK" in said:
        allow = f"oc create rolebinding lockstep-rdma --clusterrole=lockstep-rdma --serviceaccount={namespace}:NAME -n {namespace}"
        return f"{violations}: RDMA pods need the SCC of `make deploy-cluster` ({allow}, with the cluster's service account as NAME)"
    return f"{violations}: oc adm policy who-can use scc restricted-v2 -n {namespace} shows who may use which"
