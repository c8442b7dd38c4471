"""Quotas and limit ranges against a job of the default size: as the API server would complete, check and count its pods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.names import AGENT_CONTAINER, CONTAINER
from lockstep.api.objects import Object
from lockstep.api.quantity import amount, number
from lockstep.plan.checks.finding import Finding, failed, unknown, warning
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.limitrange import Filled, as_admitted, refusals
from lockstep.plan.cluster.quota import in_scope, of_pod, unstated
from lockstep.plan.discovery.nodes import QUOTA_GPUS
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep.plan.render.pod import AGENT_RESOURCES

STATED = ("cpu", "memory")
"""What a cluster file states amounts of."""
GIB = Decimal(2**30)
BEYOND = {"cpu": "its ranks are throttled there", "memory": "what takes more is killed (OOMKilled)"}


def lint_quota(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    for kind in ("ResourceQuota", "LimitRange"):
        if not facts.list(kind).seen:
            yield unknown("gpus.default_nodes", f"what the namespace may use: {facts.list(kind).why_not}")
    ranges = facts.list("LimitRange").items
    pod, filled = as_admitted(_pod(spec), ranges)
    for quota in facts.list("ResourceQuota").items:
        if in_scope(quota, pod):
            yield from _quota(quota, pod, spec.gpus.default_nodes)
    yield from _ranges(pod, filled, ranges)


def _pod(spec: TrainingClusterSpec) -> Object:
    """What counts of a pod, before the API server completes it."""
    devices = {GPU_RESOURCE: str(spec.gpus.per_node)} if spec.gpus.per_node else {}
    resources = {"requests": spec.resources.requests.to_dict() | devices, "limits": spec.resources.limits.to_dict() | devices}
    agent = {"name": AGENT_CONTAINER, "resources": AGENT_RESOURCES}
    return {"spec": {"containers": [{"name": CONTAINER, "resources": resources}], "initContainers": [agent]}}


def _key(counted: str) -> str:
    """Of the file, for what a quota counts; '' where no key says it."""
    which, _, resource = counted.rpartition(".")
    if resource in STATED:
        return f"resources.{which or 'requests'}.{resource}"
    return "gpus.default_nodes" if counted in ("pods", "count/pods", QUOTA_GPUS) else ""


def _quota(quota: Object, pod: Object, nodes: int) -> Iterator[Finding]:
    name, need = quota["metadata"]["name"], of_pod(pod)
    hard_by = (quota.get("spec") or {}).get("hard") or {}
    for resource in unstated(hard_by, pod):
        said = f"quota {name} counts {resource}, so every pod must state it, and the cluster doesn't"
        yield failed(_key(resource), said, f"set {_key(resource)}")
    used_by = (quota.get("status") or {}).get("used") or {}
    for resource, text in hard_by.items():
        hard, key, each = amount(text), _key(resource), need.get(resource, Decimal(0))
        if key and hard is not None:
            yield from _room(name, key, resource, each * nodes, hard, number(used_by.get(resource)), nodes)


def _room(name: str, key: str, resource: str, need: Decimal, hard: Decimal, used: Decimal, nodes: int) -> Iterator[Finding]:
    if need > hard:
        said = f"a job of {nodes} nodes needs {_short(need)} {resource}, quota {name} gives {_short(hard)}"
        yield failed(key, said, "smaller jobs, or a larger quota")
    elif need + used > hard:
        said = f"quota {name}: {_short(used)} of {_short(hard)} {resource} are used, a job of {nodes} nodes needs {_short(need)} more"
        yield warning(key, said, "it waits until others end")


def _short(value: Decimal) -> str:
    return f"{value / GIB:.4g}Gi" if value >= GIB else f"{value.normalize():f}"


def _ranges(pod: Object, filled: Sequence[Filled], ranges: Sequence[Object]) -> Iterator[Finding]:
    refused = refusals(pod, filled, ranges)
    for one in refused:
        key = f"resources.{one.which}.{one.resource}" if one.resource in STATED else f"resources.{one.which}"
        said = f'{one.said}: pods would be refused with "{one.quoted}"'
        if one.container == AGENT_CONTAINER:
            yield failed("cluster.namespace", said, "another limit range, or another namespace: this container is Lockstep's own")
        else:
            yield failed(key, said, f"set {key} otherwise, or a larger limit range")
    told = {(one.container, one.resource) for one in refused}
    given = [one for one in filled if one.which == "limits" and (one.container, one.resource) not in told]
    yield from map(_limited, given)


def _limited(one: Filled) -> Finding:
    """A limit that nobody has stated, and that every pod gets."""
    key = f"resources.limits.{one.resource}" if one.resource in STATED else "resources.limits"
    beyond = f": {BEYOND[one.resource]}" if one.resource in BEYOND else ""
    said = f"it states no limit, and LimitRange {one.range} then limits every pod to {one.value} {one.resource}{beyond}"
    return warning(key, said, f"set {key} to what a pod may use")
