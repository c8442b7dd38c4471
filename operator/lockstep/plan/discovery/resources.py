"""Requests and limits of every pod: half a node, as far as the namespace's quotas and limit ranges go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

from lockstep.api.objects import Object
from lockstep.api.quantity import number
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.discovery.draft import Entry, left_out, stated, unknown
from lockstep.plan.discovery.nodes import Group, default_nodes
from lockstep.plan.waiting.nodes import GIB, allocatable

AMOUNTS = ("memory", "cpu")
EXAMPLES = {"requests": {"memory": "128Gi", "cpu": 32}, "limits": {"memory": "256Gi", "cpu": 64}}
CHOICE = "a choice, not a finding"


def resource_entries(facts: ClusterFacts, groups: Sequence[Group]) -> Iterator[Entry]:
    """The section `resources`. Half of what the smallest node has is enough for a model's loading and leaves room for others.

    Limits stand there only where a pod without them would be refused, or be given others.
    """
    needed = limits_needed(facts)
    if not groups:
        yield from _not_known(facts, needed)
        return
    nodes = groups[0].nodes
    has = {resource: min(allocatable(node, resource) for node in nodes) for resource in AMOUNTS}
    bounds = {resource: _bounds(facts, groups[0], resource) for resource in AMOUNTS}
    requests = {resource: min([has[resource] / 2, *bounds[resource].values()]) for resource in AMOUNTS}
    source = f"half of what the smallest of these nodes has for pods ({has['cpu']:f} CPUs, {has['memory'] / GIB:.0f}Gi)"
    less = dict.fromkeys(who for resource in AMOUNTS for who, most in bounds[resource].items() if most == requests[resource])
    source += f", or as much as {' and '.join(less)} {'allows' if len(less) == 1 else 'allow'} a pod" if less else ""
    yield stated("resources.requests", {resource: _spelled(resource, requests[resource]) for resource in AMOUNTS}, f"{source}; {CHOICE}")
    if needed:
        limits = {resource: _spelled(resource, requests[resource]) for resource in AMOUNTS if resource in needed}
        yield stated("resources.limits", limits, f"{_together(needed)}. As much as is requested is {CHOICE}")


def _not_known(facts: ClusterFacts, needed: dict[str, list[str]]) -> Iterator[Entry]:
    """Nobody knows what such jobs need; but not what becomes of a pod that doesn't say it, either."""
    listing = facts.list("Node")
    why = "ranks on the CPU: say what your jobs need" if listing.seen else f"unknown: {listing.why_not}"
    yield left_out("resources.requests", EXAMPLES["requests"], why)
    if needed:
        yield unknown("resources.limits", EXAMPLES["limits"], f"what your jobs need, and it must be said: {_together(needed)}")


def _together(needed: dict[str, list[str]]) -> str:
    return "; ".join(dict.fromkeys(why for reasons in needed.values() for why in reasons))


def limits_needed(facts: ClusterFacts) -> dict[str, list[str]]:
    """Resources, of CPU and memory, that a pod must state limits of → why."""
    reasons: dict[str, list[str]] = {}
    for limit_range in facts.list("LimitRange").items:
        limits = default_limits(limit_range)
        defaults = ", ".join(f"{resource} {limits[resource]}" for resource in sorted(limits) if resource in AMOUNTS)
        for resource in AMOUNTS:
            if resource in limits:
                why = f"limit range {limit_range['metadata']['name']} limits pods that state none to {defaults}"
                reasons.setdefault(resource, []).append(why)
    for quota in facts.list("ResourceQuota").items:
        for resource in AMOUNTS:
            if f"limits.{resource}" in (quota["spec"].get("hard") or {}):
                why = f"quota {quota['metadata']['name']} counts limits.{resource} and refuses pods that state none"
                reasons.setdefault(resource, []).append(why)
    return reasons


def default_limits(limit_range: Object) -> dict[str, str]:
    """Limits of a container that states none: a maximum is a default limit, too."""
    rules = _rules(limit_range, "Container")
    return {
        resource: str(value) for rule in rules for resource, value in {**(rule.get("max") or {}), **(rule.get("default") or {})}.items()
    }


def _rules(limit_range: Object, *kinds: str) -> list[Object]:
    """`kinds`: Container, Pod or PersistentVolumeClaim."""
    return [rule for rule in (limit_range.get("spec") or {}).get("limits") or [] if rule.get("type") in kinds]


def _bounds(facts: ClusterFacts, group: Group, resource: str) -> dict[str, Decimal]:
    """Quotas and limit ranges that bound a pod → how much they allow it; of a quota, each pod of a job of the default size has its part."""
    bounds: dict[str, Decimal] = {}
    for limit_range in facts.list("LimitRange").items:
        most = [rule.get("max") or {} for rule in _rules(limit_range, "Container", "Pod")]
        if stated_most := [number(each[resource]) for each in most if resource in each]:
            bounds[f"limit range {limit_range['metadata']['name']}"] = min(stated_most)
    pods = default_nodes(facts, group.gpus, len(group.nodes)).value
    for quota in facts.list("ResourceQuota").items:
        hard = quota["spec"].get("hard") or {}
        counted = [hard[key] for key in (resource, f"requests.{resource}", f"limits.{resource}") if key in hard]
        if counted:
            bounds[f"quota {quota['metadata']['name']}"] = min(number(text) for text in counted) / pods
    return bounds


def _spelled(resource: str, value: Decimal) -> str | int:
    """Rounded down; at least the smallest amount that means something."""
    if resource == "cpu":
        return int(value) if value >= 1 else f"{max(1, int(value * 1000))}m"
    return f"{int(value / GIB)}Gi" if value >= GIB else f"{max(1, int(value / 2**20))}Mi"
