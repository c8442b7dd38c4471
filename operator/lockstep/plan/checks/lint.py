"""A cluster file held against the cluster that it describes: namespace, platform, nodes, storage, rails, rights, quota (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.files.clusterfile import ClusterFile
from lockstep.api.names import AGENT_CONTAINER, CONTAINER
from lockstep.api.objects import Object
from lockstep.api.sccs import scc_refusal
from lockstep.plan.checks.site import check_nodes, check_rails, check_storage
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding, failed, fine, unknown, warning
from lockstep.plan.cluster.fitting import BEYOND, EXCEEDED, Shortage, limits_given, pod_amounts, shortages
from lockstep.plan.discovery.file import allows_ipc_lock
from lockstep.plan.discovery.nodes import QUOTA_GPUS
from lockstep.plan.discovery.rails import cluster_hardware, unused
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep.plan.render.pod import AGENT_RESOURCES
from lockstep.plan.render.security import agent_context
from lockstep.plan.waiting.nodes import GIB

OWN_SCC = "an administrator: lockstep deploy brings one that allows nothing else"


def lint_against(file: ClusterFile, facts: ClusterFacts) -> Iterator[Finding]:
    """Every finding, in the order in which they should be mended."""
    spec = file.profile.spec
    yield from _namespace(facts)
    yield from _platform(file, facts)
    yield from check_nodes(spec, facts)
    yield from check_storage(spec, facts)
    if spec.network.rdma.enabled:
        yield from check_rails(spec, facts)
    yield from unused(spec, cluster_hardware(facts, spec))
    yield from _rights(spec, facts)
    yield from _admission(spec, facts)
    yield from _quotas(spec, facts)


def _namespace(facts: ClusterFacts) -> Iterator[Finding]:
    namespace = facts.object("Namespace", facts.namespace)
    if not namespace.seen:
        yield unknown("cluster.namespace", f"whether namespace {facts.namespace} exists: you may not read it (403)")
    elif namespace.first is None:
        yield failed("cluster.namespace", f"there is no namespace {facts.namespace}", f"kubectl create namespace {facts.namespace}")


def _platform(file: ClusterFile, facts: ClusterFacts) -> Iterator[Finding]:
    stated = file.profile.spec.platform.value
    if stated == "Kubernetes" and facts.is_openshift:
        yield warning(
            "cluster.platform", "it is kubernetes, but the cluster has SCCs, which refuse a stated user id", "write platform: openshift"
        )
    elif stated == "OpenShift" and not facts.is_openshift:
        message = (
            "it is openshift (the default), but the cluster has no SCC that hands out user ids: pods would run as their image's root, or be"
            " refused"
        )
        yield failed("cluster.platform", message, "write platform: kubernetes")


def _rights(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Findings about whether RDMA pods, which run as UID 0 with IPC_LOCK, are let in."""
    if not (spec.network.rdma.enabled and spec.security.ipc_lock):
        return
    if facts.pod_security in ("restricted", "baseline"):
        message = f"namespace {facts.namespace} enforces Pod Security {facts.pod_security}, which refuses pods with IPC_LOCK"
        fix = (
            f"kubectl label namespace {facts.namespace} pod-security.kubernetes.io/enforce=privileged --overwrite, or network.rdma.memlock:"
            " unlimited"
        )
        yield failed("security.ipc_lock", message, fix)
    if not facts.is_openshift:
        return
    sccs, account = facts.list("SecurityContextConstraints"), spec.security.service_account
    allowing = [item for item in sccs.items if allows_ipc_lock(item) and (item.get("runAsUser") or {}).get("type") == "RunAsAny"]
    usable = [item for item in allowing if (facts.may_use_scc or {}).get(item["metadata"]["name"])]
    if not sccs.seen:
        yield unknown("security.ipc_lock", f"which SCC allows it: {sccs.why_not}")
    elif not allowing:
        yield failed("security.ipc_lock", "no SCC allows IPC_LOCK to UID 0", OWN_SCC)
    elif facts.may_use_scc is None:
        yield unknown("security.ipc_lock", f"whether {account} may use one of {_names(allowing)}: you may not ask for it")
    elif not usable:
        narrow = sorted(str(item["metadata"]["name"]) for item in allowing if "*" not in item["allowedCapabilities"])
        fix = f"an administrator: oc adm policy add-scc-to-user {narrow[0]} -z {account} -n {facts.namespace}" if narrow else OWN_SCC
        message = f"service account {account} may use none of the SCCs that allow IPC_LOCK ({_names(allowing)})"
        yield failed("security.service_account", message, fix)
    else:
        yield fine("security.ipc_lock", f"{account} may use {_names(usable)}")
        yield from _ungrouped(usable)


def _names(items: Sequence[Object]) -> str:
    return ", ".join(sorted(str(item["metadata"]["name"]) for item in items))


def _ungrouped(sccs: Sequence[Object]) -> Iterator[Finding]:
    """The most restrictive SCC counts, so one with a group is enough."""
    if not any((scc.get("fsGroup") or {}).get("type") == "MustRunAs" for scc in sccs):
        message = (
            f"{_names(sccs)} gives RDMA pods no fsGroup: on a shared volume they and TCP pods can't write what the other kind has made"
        )
        yield warning("security.ipc_lock", message, "an administrator: fsGroup: {type: MustRunAs} in it, as lockstep-rdma has it")


def sized_pod(spec: TrainingClusterSpec, namespace: str) -> Object:
    """A pod with the amounts that every job's pods state, and nothing else that could be refused: lint tries it out."""
    devices = {GPU_RESOURCE: str(spec.gpus.per_node)} if spec.gpus.per_node else {}
    resources = {"requests": spec.resources.requests.to_dict() | devices, "limits": spec.resources.limits.to_dict() | devices}
    common = {"image": spec.image or "lockstep-trainer", "securityContext": agent_context(spec)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "lockstep-lint-", "namespace": namespace},
        "spec": {
            "containers": [{"name": CONTAINER, "resources": resources, **common}],
            "initContainers": [{"name": AGENT_CONTAINER, "resources": AGENT_RESOURCES, **common}],
            "automountServiceAccountToken": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        },
    }


def _admission(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Findings from the dry run of one pod: the API server's refusal, or the limits that a LimitRange gives it."""
    tried = facts.tries.get("Pod")
    if tried is None:
        return
    if tried.accepted is None:
        yield unknown("resources", f"whether a pod of this size would be admitted: {tried.message}")
    elif not tried.accepted and EXCEEDED not in tried.message:  # which is counted for all pods of a job below
        fix = (
            f"change resources, or have an administrator change what refuses them (kubectl describe quota,limitrange -n {facts.namespace})"
        )
        message, fix = scc_refusal(tried.message, facts.namespace, spec.security.service_account) or (tried.message, fix)
        yield failed("resources", f"the API server refuses a pod of this size: {message}", fix)
    added = limits_given(sized_pod(spec, facts.namespace), tried.admitted)
    for resource, value in added.get(CONTAINER, {}).items():
        key = f"resources.limits.{resource}" if resource in ("cpu", "memory") else "resources.limits"
        beyond = f": {BEYOND[resource]}" if resource in BEYOND else ""
        message = f"it states no limit, and a LimitRange of the namespace then limits every pod to {value} {resource}{beyond}"
        yield warning(key, message, f"set {key} to what a pod may use")


def _quotas(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Findings about quotas that a job of the default size exceeds."""
    quotas, tried, nodes = facts.list("ResourceQuota"), facts.tries.get("Pod"), spec.gpus.default_nodes
    if not quotas.seen:
        yield unknown("gpus.default_nodes", f"what the namespace may use: {quotas.why_not}")
    pod = (tried and tried.admitted) or sized_pod(spec, facts.namespace)
    need = {resource: value * nodes for resource, value in pod_amounts(pod).items() if _key(resource)}
    for quota in quotas.items:
        for one in shortages(quota, pod, need, {}):
            yield _shortage(one, nodes)


def _key(counted: str) -> str:
    """Key of the file for what a quota counts; '' where no key says it."""
    which, _, resource = counted.rpartition(".")
    if resource in ("cpu", "memory"):
        return f"resources.{which or 'requests'}.{resource}"
    return "gpus.default_nodes" if counted in ("pods", "count/pods", QUOTA_GPUS) else ""


def _shortage(one: Shortage, nodes: int) -> Finding:
    key, need, hard = _key(one.resource), _short(one.need), _short(one.hard)
    if one.is_final:
        message = f"a job of {nodes} nodes needs {need} {one.resource}, quota {one.quota} gives {hard}"
        return failed(key, message, "smaller jobs, or a larger quota")
    used = _short(one.hard - one.free)
    message = f"quota {one.quota}: {used} of {hard} {one.resource} are used, a job of {nodes} nodes needs {need} more"
    return warning(key, message, "it waits until others end")


def _short(value: Decimal) -> str:
    return f"{value / GIB:.4g}Gi" if value >= GIB else f"{value.normalize():f}"
