"""Arithmetic that no dry run does: nodes that could take the pods of a job now, and all its pods and claims against what a namespace's
quotas have left (pure).

Nodes are counted as the scheduler counts: what a node has for pods, less what the pods on it ask for, running or not yet ended. Not looked
at: volumes that only some nodes reach, and pods that wait for a node as this job would.

What the API server makes of one pod (limits that it doesn't state, bounds of a LimitRange, amounts that a quota wants stated) a dry run of
that pod says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from lockstep.api.objects import Object
from lockstep.api.quantity import amount, number
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding, fine, note, refused, unknown, waits
from lockstep.plan.waiting.nodes import (
    PODS,
    allocatable,
    effective,
    named,
    request,
    requested_resources,
    shown_amount,
    who_holds,
    why_never,
)
from lockstep_spec.words import number_of

NODES, QUOTA = "nodes", "quota"
"""Sections of a plan."""
MORE_NODES = "add nodes, or ask for fewer (spec.nodes)"
OVER = ("Succeeded", "Failed")
Amounts = Mapping[str, Decimal]
COUNTED = {
    "Service": "services", "Secret": "secrets", "ConfigMap": "configmaps", "PersistentVolumeClaim": "persistentvolumeclaims",
    "StatefulSet": "statefulsets.apps", "NetworkPolicy": "networkpolicies.networking.k8s.io",
}  # fmt: skip
BEYOND = {"cpu": "it is throttled there", "memory": "what takes more is killed, OOMKilled"}
"""Fate of a container that wants more than its limit."""

EXCEEDED = "exceeded quota"
"""Part of the API server's refusal of a pod for which a quota has no room at the moment."""


def room(pod: Object, needed: int, facts: ClusterFacts) -> Iterator[Finding]:
    """Findings about where `needed` pods fit now. `pod`: one as the job's StatefulSet would make it, all of which are alike and want a node
    each.
    """
    nodes = facts.list("Node")
    if not nodes.seen:
        message = (
            f"whether {needed} nodes have room: your account may not list nodes (an administrator can: lockstep plan, with the same file)"
        )
        yield unknown(NODES, message)
        return
    never = {_name(node): why for node in nodes.items if (why := why_never(pod, node)) is not None}
    possible = [node for node in nodes.items if _name(node) not in never]
    if not facts.list("Pod").seen:
        yield from _unseen(possible, needed, len(nodes.items))
        yield from _obstacles(never)
        return
    mine = {str(own["metadata"]["uid"]) for own in facts.own_pods}
    others = [other for other in facts.list("Pod").items if str(other["metadata"]["uid"]) not in mine]
    lacking = _lacking(pod, possible, others)
    fitting = [_name(node) for node in possible if _name(node) not in lacking]
    if len(fitting) >= needed:
        message = f"{len(fitting)} of {len(nodes.items)} nodes fit now ({', '.join(sorted(fitting))}); the job needs {needed}"
        yield fine(NODES, message)
    else:
        yield _too_few(pod, needed, fitting, possible, lacking, others)
    yield from _obstacles({name: text for name, (_, text) in lacking.items()} | never)


def never_enough(pod: Object, needed: int, nodes: Sequence[Object]) -> str:
    """Sentence that the cluster has too few nodes for such pods even when all of it is idle; '' where it has enough."""
    never = {_name(node): why for node in nodes if (why := why_never(pod, node)) is not None}
    possible = len(nodes) - len(never)
    if possible >= needed:
        return ""
    why = "; ".join(one.message for one in _obstacles(never))
    return (
        f"{needed} nodes are asked for, and even when idle {_only(possible)} of the cluster's {len(nodes)} could take a"
        f" pod{why and f' ({why})'}"
    )


def _unseen(possible: Sequence[Object], needed: int, total: int) -> Iterator[Finding]:
    text = f"{len(possible)} of {total} nodes could take a pod; the job needs {needed}"
    if len(possible) < needed:
        yield waits(NODES, text, MORE_NODES, f"{number_of(needed - len(possible), 'more node')} that can take a pod")
    else:
        yield unknown(NODES, f"{text}; what is free on them: your account may not list pods of all namespaces")


def _too_few(
    pod: Object,
    needed: int,
    fitting: Sequence[str],
    possible: Sequence[Object],
    lacking: Mapping[str, tuple[str, str]],
    others: Sequence[Object],
) -> Finding:
    missing = needed - len(fitting)
    hosts = f" ({', '.join(sorted(fitting))})" if fitting else ""
    message = f"{len(fitting)} of the {needed} nodes that the job needs fit now{hosts}"
    if len(possible) < needed:
        idle = f"even when idle {_only(len(possible))} could take a pod"
        return waits(NODES, f"{message}; {idle}", MORE_NODES, f"{number_of(missing, 'more node')} that can take a pod ({idle})")
    wanting: dict[str, list[str]] = defaultdict(list)
    for node, (resource, _) in lacking.items():
        wanting[resource].append(node)
    who = [who_holds(others, frozenset(nodes), resource, request(pod, resource)) for resource, nodes in wanting.items()]
    return waits(NODES, message, "; ".join(filter(None, who)), f"room on {number_of(missing, 'more node')}")


def _only(count: int) -> str:
    return f"only {count}" if count else "none"


def _obstacles(why: Mapping[str, str]) -> Iterator[Finding]:
    groups: dict[str, list[str]] = defaultdict(list)
    for node, text in why.items():
        groups[text].append(node)
    for text, nodes in groups.items():
        yield note(NODES, f"{named(nodes)}: {text}")


def _lacking(pod: Object, nodes: Iterable[Object], others: Iterable[Object]) -> dict[str, tuple[str, str]]:
    """Node → the first resource of which it has too little left, and that in words. Devices come before CPU and memory."""
    on: dict[str, list[Object]] = defaultdict(list)
    for other in others:
        if other["spec"].get("nodeName") and other.get("status", {}).get("phase") not in OVER:
            on[str(other["spec"]["nodeName"])].append(other)
    lacking: dict[str, tuple[str, str]] = {}
    for node in nodes:
        name = _name(node)
        for resource in (*requested_resources(pod), PODS):
            want = request(pod, resource)
            free = allocatable(node, resource) - sum((request(other, resource) for other in on[name]), Decimal(0))
            if free < want:
                left, all_of_it = shown_amount(max(free, Decimal(0)), resource), shown_amount(allocatable(node, resource), resource)
                lacking[name] = (resource, f"has {left} of {all_of_it} {resource} free, a pod asks for {shown_amount(want, resource)}")
                break
    return lacking


def _name(node: Object) -> str:
    return str(node["metadata"]["name"])


@dataclass(frozen=True)
class Shortage:
    """One amount of one quota that is too small for what is asked for, now or ever."""

    quota: str
    resource: str
    need: Decimal
    hard: Decimal
    free: Decimal

    @property
    def is_final(self) -> bool:
        """True if it is too small even when nobody else uses any of it."""
        return self.need > self.hard


def shortages(quota: Object, pod: Object, need: Amounts, present: Amounts) -> Iterator[Shortage]:
    """`need`: by the quota's own names. `present`: the part of what is used that is free for this job again: its own pods'."""
    if not in_scope(quota, pod):
        return
    status = quota.get("status") or {}
    for resource, stated in (status.get("hard") or (quota.get("spec") or {}).get("hard") or {}).items():
        hard, wants = amount(str(stated)), need.get(resource)
        if hard is None or not wants:
            continue
        free = hard - number((status.get("used") or {}).get(resource)) + present.get(resource, Decimal(0))
        if wants > min(hard, free):
            yield Shortage(str(quota["metadata"]["name"]), resource, wants, hard, free)


def quota_findings(pod: Object, pods: int, others: Sequence[Object], facts: ClusterFacts) -> Iterator[Finding]:
    """`pod`: as the API server would admit it. `others`: what else would be made, claims of every pod among them."""
    quotas = facts.list("ResourceQuota")
    if not quotas.seen:
        yield unknown(QUOTA, "whether a ResourceQuota leaves room: your account may not list them")
    else:
        need, present = job_amounts(pod, pods, others), job_amounts(pod, len(facts.own_pods), ())
        short = [_short(one, facts.namespace) for quota in quotas.items for one in shortages(quota, pod, need, present)]
        names = ", ".join(sorted(quota["metadata"]["name"] for quota in quotas.items))
        yield from short or [fine(QUOTA, f"{names} leaves room" if names else "the namespace has no ResourceQuota")]
    claims = [item for item in others if item["kind"] == "PersistentVolumeClaim"]
    for limit_range in facts.list("LimitRange").items:
        for rule in (limit_range.get("spec") or {}).get("limits") or []:
            for claim in claims if rule.get("type") == "PersistentVolumeClaim" else ():
                yield from _claim_bounds(limit_range["metadata"]["name"], rule, claim)


def _short(one: Shortage, namespace: str) -> Finding:
    plain = one.resource.removeprefix("requests.").removeprefix("limits.")
    need, hard = _shown(one.need, plain), _shown(one.hard, plain)
    asks, look = f"the job asks for {need} {one.resource}", f"kubectl describe quota {one.quota} -n {namespace}"
    if one.is_final:
        fix = f"ask for less, or have an administrator raise it ({look})"
        return refused(QUOTA, f"quota {one.quota} allows {hard} in all, {asks}", fix)
    left = _shown(max(one.free, Decimal(0)), plain)
    awaited = f"quota {one.quota} to have {need} {one.resource} free"
    return waits(QUOTA, f"quota {one.quota} has {left} of {hard} left, {asks}", look, awaited)


def job_amounts(pod: Object, pods: int, others: Iterable[Object]) -> dict[str, Decimal]:
    """Everything that a quota may count, by the quota's own names."""
    need: dict[str, Decimal] = defaultdict(Decimal, {key: value * pods for key, value in pod_amounts(pod).items()})
    for item in others:
        plural = COUNTED.get(item["kind"])
        if plural is None:
            continue
        need[f"count/{plural}"] += 1
        need[plural] += 1
        if item["kind"] == "PersistentVolumeClaim":
            _count_claim(need, item)
    return need


def pod_amounts(pod: Object) -> dict[str, Decimal]:
    """Amounts of one pod, by the quota's own names."""
    need = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for which in ("requests", "limits"):
        for resource in {name for c in containers(pod) for name in _amounts(c, which)}:
            value = request(pod, resource) if which == "requests" else effective(pod, resource, which)
            need[f"{which}.{resource}"] = value
            if which == "requests" and resource in ("cpu", "memory", "ephemeral-storage"):
                need[resource] = value
    return need


def containers(pod: Object) -> list[Object]:
    return [container for kind in ("containers", "initContainers") for container in pod["spec"].get(kind) or []]


def _amounts(container: Object, which: str) -> dict[str, str]:
    return (container.get("resources") or {}).get(which) or {}


def limits_given(stated: Object, admitted: Object | None) -> dict[str, dict[str, str]]:
    """Container → the limits by resource that it doesn't state, and that a LimitRange has given it in the pod that the API server
    admitted.
    """
    before = {container["name"]: _amounts(container, "limits") for container in containers(stated)}
    added = {
        str(container["name"]): {key: value for key, value in _amounts(container, "limits").items() if key not in before[container["name"]]}
        for container in containers(admitted or stated)
        if container["name"] in before
    }
    return {name: limits for name, limits in added.items() if limits}


def _count_claim(need: dict[str, Decimal], claim: Object) -> None:
    size = number(claim["spec"]["resources"]["requests"]["storage"])
    need["requests.storage"] += size
    storage_class = claim["spec"].get("storageClassName")
    if storage_class:
        need[f"{storage_class}.storageclass.storage.k8s.io/requests.storage"] += size
        need[f"{storage_class}.storageclass.storage.k8s.io/persistentvolumeclaims"] += 1


def _shown(value: Decimal, resource: str) -> str:
    return shown_amount(value, "memory" if resource.endswith("storage") else resource)


def in_scope(quota: Object, pod: Object) -> bool:
    """Return True if the quota counts such pods. Ours always ask for something, so they are never BestEffort; they have no deadline of
    their own.
    """
    spec = quota.get("spec") or {}
    rules = (spec.get("scopeSelector") or {}).get("matchExpressions") or []
    scopes = {*(spec.get("scopes") or []), *(str(rule["scopeName"]) for rule in rules if rule["scopeName"] != "PriorityClass")}
    if scopes & {"BestEffort", "Terminating", "CrossNamespacePodAffinity"}:
        return False
    return all(_priority_fits(rule, pod["spec"].get("priorityClassName", "")) for rule in rules if rule["scopeName"] == "PriorityClass")


def _priority_fits(rule: Object, priority: str) -> bool:
    listed = priority in (rule.get("values") or [])
    return {"In": listed, "NotIn": not listed, "Exists": bool(priority), "DoesNotExist": not priority}.get(str(rule["operator"]), True)


def _claim_bounds(name: str, rule: Object, claim: Object) -> Iterator[Finding]:
    size, who = claim["spec"]["resources"]["requests"]["storage"], f"claim {claim['metadata']['name']}"
    most, least = ((rule.get(bound) or {}).get("storage") for bound in ("max", "min"))
    too_large, too_small = most is not None and number(size) > number(most), least is not None and number(size) < number(least)
    if too_large or too_small:
        bound = f"allows at most {most}" if too_large else f"wants at least {least}"
        fix = "change the cluster's storage sizes, or the range"
        yield refused(QUOTA, f"LimitRange {name} {bound} storage, {who} has {size}", fix)
