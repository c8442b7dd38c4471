"""Faults that the people of a cluster make around a job: rules, quotas, accounts, and what they do to its objects and Nodes."""

from __future__ import annotations

from typing import Any

from kubernetes import client

from corpus.of_clusters import (
    EATS,
    Act,
    ClusterFault,
    Place,
    account,
    both,
    cluster_like_local,
    delete,
    evict,
    expect,
    made,
    no_such_cluster,
    nodes,
    refused,
    waits,
)  # fmt: skip
from support.clusters.cluster_jobs import SERVICE_ACCOUNT, until

POLICIES = "admissionregistration.k8s.io/v1"


def _quota(**hard: str) -> Act:
    return made({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"}, "spec": {"hard": hard}})


def _later_quota(place: Place) -> None:
    _quota(pods="1")(place)
    until("the quota counts", lambda: ((place.jobs.get("ResourceQuota", "quota") or {}).get("status") or {}).get("used"))
    delete("Pod", "{}-1")(place)


def _policy(group: str, resource: str, message: str) -> Act:
    """A rule of the API server itself that refuses what has no label `cost-center`."""

    def make(place: Place) -> None:
        rule = {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]}
        check = {"expression": "has(object.metadata.labels) && 'cost-center' in object.metadata.labels", "message": message}
        where = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}}}
        policy = {"matchConstraints": {"resourceRules": [rule]}, "validations": [check], "failurePolicy": "Fail"}
        binding = {"policyName": place.namespace, "validationActions": ["Deny"], "matchResources": where}
        for kind, spec in (("ValidatingAdmissionPolicy", policy), ("ValidatingAdmissionPolicyBinding", binding)):
            body = {"apiVersion": POLICIES, "kind": kind, "metadata": {"name": place.namespace}, "spec": spec}
            place.jobs.kind(kind, POLICIES).create(body=body)
        until("the policy is in force", lambda: _is_refused(place, resource))

    return make


def _is_refused(place: Place, resource: str) -> bool:
    pod: dict[str, Any] = {
        "metadata": {"name": "probe", "labels": {"app": "probe"}},
        "spec": {"containers": [{"name": "c", "image": "none"}]},
    }
    spec = {"selector": {"matchLabels": {"app": "probe"}}, "serviceName": "probe", "template": pod}
    body = pod if resource == "pods" else {"metadata": {"name": "probe"}, "spec": spec}
    core, apps = place.core, client.AppsV1Api(place.jobs.api.client)
    try:
        (core.create_namespaced_pod if resource == "pods" else apps.create_namespaced_stateful_set)(place.namespace, body, dry_run="All")
    except client.ApiException as error:
        return "cost-center" in str(error.body)
    return False


def _no_policy(place: Place) -> None:
    for kind in ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"):
        place.jobs.kind(kind, POLICIES).delete(name=place.namespace)


def _default_limit(place: Place) -> None:
    limits = [{"type": "Container", "default": {"memory": "256Mi"}, "defaultRequest": {"memory": "64Mi"}}]
    made({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "default"}, "spec": {"limits": limits}})(place)


def _evicted_by_the_kubelet(place: Place) -> None:
    """As a kubelet writes it when a pod fills an emptyDir: this cluster's measures no volumes."""
    status = {"phase": "Failed", "reason": "Evicted", "message": 'Usage of EmptyDir volume "scratch" exceeds the limit "10Mi". '}
    place.core.patch_namespaced_pod_status(f"{place.name}-1", place.namespace, {"status": status})


def _debugger(place: Place) -> None:
    """As `kubectl debug` does, with an image that isn't there."""
    body = {"spec": {"ephemeralContainers": [{"name": "debugger", "image": "localhost/lockstep/none:1", "targetContainerName": "agent"}]}}
    place.core.patch_namespaced_pod_ephemeralcontainers(f"{place.name}-1", place.namespace, body)


def _much_cpu(spec: dict[str, Any]) -> None:
    spec["resources"] = {"requests": {"memory": "128Mi", "cpu": "500"}}


NO_KEY = {"env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub-login", "key": "token"}}}]}
LOGIN = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-login"}, "stringData": {"password": "x"}}
LABEL = "every object needs the label cost-center"

ADMINISTRATOR_FAULTS = (
    ClusterFault("quota-of-sets", "a quota allows no StatefulSet", refused("WriteRefused", "quota", "describe quota"),
        before=_quota(**{"count/statefulsets.apps": "0"}), after=delete("ResourceQuota", "quota")),
    ClusterFault("quota-of-claims", "a quota allows no more claims, and the job needs new ones", waits("PodsRefused", "quota", "quota"),
        {"storage": {"mode": "PerPod"}}, before=_quota(**{"requests.storage": "1Mi"}), after=delete("ResourceQuota", "quota")),
    ClusterFault("quota-later", "a quota comes after the start, and a pod is then deleted",
        expect("NodeLost", "exceeded quota", "describe quota", node=1, state="Restarting"), act=_later_quota,
            after=delete("ResourceQuota", "quota"), seconds=120.0),
    ClusterFault("quota-of-limits", "a quota wants every container to state a memory limit",
        waits("PodsRefused", "requires every pod to state limits.memory", "quota|resources"), before=_quota(**{"limits.memory": "8Gi"}),
            after=delete("ResourceQuota", "quota")),
    ClusterFault("policy-of-pods", "an admission policy refuses the pods", waits("PodsRefused", LABEL, "statefulset|label"),
        before=_policy("", "pods", LABEL), after=_no_policy),
    ClusterFault("policy-of-sets", "an admission policy refuses the StatefulSet",
        refused("WriteRefused", LABEL, "ask the person who set the rule"), before=_policy("apps", "statefulsets", LABEL), after=_no_policy),
    ClusterFault("no-key", "a Secret lacks the key that a variable takes", waits("ContainerNotStarted", "token", "key"), NO_KEY,
        before=made(LOGIN), after=delete("Secret", "hub-login")),
    ClusterFault("much-cpu", "a pod asks for more CPU than any Node has",
        waits("Unschedulable", "(?i)cpu", "cpu|resources|requests|scheduler"), before=cluster_like_local(_much_cpu), after=no_such_cluster),
    ClusterFault("account-later", "the service account is deleted while the job runs",
        expect("ServiceAccountNotFound", SERVICE_ACCOUNT, "kubectl create serviceaccount", state="Running"),
            act=delete("ServiceAccount", SERVICE_ACCOUNT), after=account),
    ClusterFault("drained", "all Nodes are cordoned, and a pod is evicted",
        expect("NodeLost", "cordon", "uncordon", node=1, state="Restarting"), act=both(nodes({"unschedulable": True}), evict),
            after=nodes({"unschedulable": None}), seconds=120.0),
    ClusterFault("script-map-deleted", "the ConfigMap with the script is deleted, and then a pod",
        expect("NodeLost", "script-script-map-deleted", "kubectl create configmap", node=1, state="Restarting"),
            act=both(delete("ConfigMap", "script-{}"), delete("Pod", "{}-1")), seconds=150.0),
    ClusterFault("default-limit", "a LimitRange gives containers a small memory limit",
        expect("OutOfMemory", "its limit of 256 MiB", "LimitRange|resources.limits.memory", rank=1, node=1), script=EATS,
            before=_default_limit, after=delete("LimitRange", "default")),
    ClusterFault("debugger", "a debug container that can't start is added to a pod", expect("", "", "logs", state="Running"), act=_debugger,
        seconds=30.0),
    ClusterFault("scratch", "a rank writes more than an emptyDir may hold, and its pod is evicted",
        expect("NodeLost", "exceeds the limit", "logs", node=1, state="Running"), act=_evicted_by_the_kubelet, seconds=150.0),
)  # fmt: skip
