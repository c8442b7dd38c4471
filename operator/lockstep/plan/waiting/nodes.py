"""Reasons why nodes can't take a pod: each node's first obstacle, and nodes with the same one in the same part of the sentence (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import NamedTuple

from lockstep.api.names import LABEL_HOSTNAME
from lockstep.api.objects import Object
from lockstep.api.quantity import number
from lockstep.plan.waiting.holders import who_holds
from lockstep.plan.waiting.requests import asked, request
from lockstep_spec import words

NAMED_NODES = 4
GIB = Decimal(2**30)
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_CONTROL_PLANE = "node-role.kubernetes.io/"
Obstacle = tuple[str, str]
"""Text about one node, and about several."""


class Others(NamedTuple):
    """Pods of anybody else, and which dev environments nobody uses, by namespace and name."""

    pods: Iterable[Object] = ()
    unused: frozenset[tuple[str, str]] = frozenset()


def why_no_node_fits(pod: Object, nodes: Sequence[Object], used_up: Sequence[str], others: Others) -> list[str]:
    """Parts of a sentence; [] when nothing seen here explains it. `used_up`: resources that the scheduler found wanting somewhere."""
    wanted = [node for node in nodes if _is_wanted(pod, node)]
    if nodes and not wanted:
        return [_nobody_matches(pod)]
    groups: dict[Obstacle, list[str]] = defaultdict(list)
    free = []
    for node in wanted:
        obstacle = _obstacle(pod, node)
        if obstacle is None:
            free.append(node)
        else:
            groups[obstacle].append(node["metadata"]["name"])
    if len(groups) > 1:  # what keeps jobs off control planes is worth a word only when nothing else is
        groups = {said: names for said, names in groups.items() if _CONTROL_PLANE not in said[0]}
    parts = [f"{named(names)} {one if len(names) == 1 else many}" for (one, many), names in groups.items()]
    return parts + [_in_use(pod, free, resource, others) for resource in used_up if free and _is_asked(pod, resource)]


def why_never(pod: Object, node: Object) -> str | None:
    """Return why this node could not take the pod even if nobody used it; None if it could."""
    if not _is_wanted(pod, node):
        return "is none of those that the job and its cluster name by node names and selectors"
    obstacle = _obstacle(pod, node)
    return None if obstacle is None else obstacle[0]


def fitting_nodes(pod: Object, nodes: Sequence[Object]) -> list[str]:
    """Nodes that could ever take the pod, whoever uses them now."""
    return [str(node["metadata"]["name"]) for node in nodes if _is_wanted(pod, node) and _obstacle(pod, node) is None]


def _is_wanted(pod: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels", {})
    selected = all(labels.get(key) == value for key, value in (pod["spec"].get("nodeSelector") or {}).items())
    terms = _terms(pod)
    return selected and (not terms or any(_host_fits(term, labels) and _name_fits(term, node) for term in terms))


def _terms(pod: Object) -> list[Object]:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    return list((affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or [])


def _host_fits(term: Object, labels: dict[str, str]) -> bool:
    return all(_rule_fits(rule, labels) for rule in term.get("matchExpressions", []) if rule["key"] == LABEL_HOSTNAME)


def _name_fits(term: Object, node: Object) -> bool:
    """Fields of a node: what is left out by preflight."""
    name = {LABEL_HOSTNAME: node["metadata"]["name"]}
    return all(_rule_fits(rule, name) for rule in term.get("matchFields", []))


def _rule_fits(rule: Object, labels: dict[str, str]) -> bool:
    listed = labels.get(LABEL_HOSTNAME) in rule.get("values", [])
    return {"In": listed, "NotIn": not listed}.get(rule["operator"], True)


def _nobody_matches(pod: Object) -> str:
    selector = ", ".join(f"{key}={value}" for key, value in (pod["spec"].get("nodeSelector") or {}).items())
    hosts = sorted({v for t in _terms(pod) for r in t.get("matchExpressions", []) if r["operator"] == "In" for v in r.get("values", [])})
    said = [f"the node selector {selector}" if selector else "", f"the cluster's nodes.gpuNodes ({', '.join(hosts)})" if hosts else ""]
    return f"no node of the cluster matches {' and '.join(filter(None, said)) or 'what the job and its cluster file ask of nodes'}"


def _obstacle(pod: Object, node: Object) -> Obstacle | None:
    return _taint_obstacle(pod, node) or _size_obstacle(pod, node)


def _taint_obstacle(pod: Object, node: Object) -> Obstacle | None:
    spec = node.get("spec", {})
    barring = barring_taints(node, pod["spec"].get("tolerations") or [])
    if any(taint["key"] in _NOT_READY for taint in barring):
        return "is not ready", "are not ready"
    if spec.get("unschedulable") or any(taint["key"] == _UNSCHEDULABLE for taint in barring):
        return "is cordoned", "are cordoned"
    if not barring:
        return None
    said = f"the taint {shown_taint(barring[0])}, which neither podTemplate.tolerations nor the cluster's pod.tolerations tolerates"
    return f"has {said}", f"have {said}"


def _size_obstacle(pod: Object, node: Object) -> Obstacle | None:
    """The first resource of which the whole node has too little, whoever uses it."""
    for resource in asked(pod):
        wants, there = request(pod, resource), allocatable(node, resource)
        if there == 0:
            return f"lacks {resource}", f"lack {resource}"
        if there < wants:
            said = f"only {shown_amount(there, resource)} of the {shown_amount(wants, resource)} {resource} that a pod asks for"
            return f"has {said}", f"have {said}"
    return None


def _is_asked(pod: Object, resource: str) -> bool:
    return resource in asked(pod)


def allocatable(node: Object, resource: str) -> Decimal:
    """Amount that the node has for pods, in use or not."""
    return number(node.get("status", {}).get("allocatable", {}).get(resource))


def shown_amount(value: Decimal, resource: str) -> str:
    """Bytes as GiB, everything else as it is counted."""
    if resource in ("memory", "ephemeral-storage") or resource.startswith("hugepages-"):
        return f"{value / GIB:.1f}Gi"
    return f"{value.normalize():f}"


def _in_use(pod: Object, nodes: list[Object], resource: str, others: Others) -> str:
    names = [node["metadata"]["name"] for node in nodes]
    who = who_holds(others.pods, frozenset(names), resource, request(pod, resource), others.unused)
    return f"{resource} is in use on {named(names)}" + (f": {who}" if who else "")


def named(nodes: list[str]) -> str:
    """`node a`, or `nodes a, b and 3 more`."""
    return words.named("node", sorted(nodes), NAMED_NODES)


HARD = ("NoSchedule", "NoExecute")
PASSING = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Kubernetes sets and takes away these by itself: not ready, cordoned, short of memory."""


def barring_taints(node: Object, tolerations: Sequence[Object]) -> list[Object]:
    """Taints that keep off a pod with these tolerations, in the node's order."""
    taints = [taint for taint in node.get("spec", {}).get("taints") or [] if taint["effect"] in HARD]
    return [taint for taint in taints if not any(_tolerates(toleration, taint) for toleration in tolerations)]


def lasting_taints(node: Object, tolerations: Sequence[Object]) -> list[Object]:
    """Return those of `barring_taints` that somebody has put there."""
    return [taint for taint in barring_taints(node, tolerations) if not taint["key"].startswith(PASSING)]


def shown_taint(taint: Object) -> str:
    """Return the taint as `kubectl taint` takes it: dedicated=infra:NoSchedule."""
    return f"{taint['key']}{'=' + taint['value'] if taint.get('value') else ''}:{taint['effect']}"


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    same_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
    return bool(toleration["key"] == taint["key"]) and same_value
