"""Nodes that could take a pod of the job now, and what keeps it off each of the others (pure).

Counted as the scheduler counts: what a node has for pods, less what the pods on it ask for, running or not yet ended. Not looked at: volumes that only some nodes reach,
and pods that wait for a node as this job would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

from lockstep.api.objects import Object
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.waiting.nodes import PODS, allocatable, asked, named, request, shown_amount, who_holds, why_never

SECTION = "nodes"
OVER = ("Succeeded", "Failed")


def room(pod: Object, needed: int, facts: ClusterFacts) -> Iterator[Finding]:
    """Findings about where `needed` pods fit now. `pod`: one as the job's StatefulSet would make it, all of which are alike and want a node each."""
    nodes = facts.list("Node")
    if not nodes.seen:
        message = (
            f"whether {needed} nodes have room: your account may not list nodes (an administrator can: lockstep plan, with the same file)"
        )
        yield Finding(SECTION, Outcome.UNKNOWN, message)
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
        yield Finding(SECTION, Outcome.OK, message)
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
    return f"{needed} nodes are asked for, and even when idle {_only(possible)} of the cluster's {len(nodes)} could take a pod{why and f' ({why})'}"


def _unseen(possible: Sequence[Object], needed: int, total: int) -> Iterator[Finding]:
    text = f"{len(possible)} of {total} nodes could take a pod; the job needs {needed}"
    if len(possible) < needed:
        yield Finding(
            SECTION, Outcome.WAITS, text, "add nodes, or ask for fewer (spec.nodes)", f"{_more(needed - len(possible))} that can take a pod"
        )
    else:
        yield Finding(SECTION, Outcome.UNKNOWN, f"{text}; what is free on them: your account may not list pods of all namespaces")


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
        return Finding(
            SECTION,
            Outcome.WAITS,
            f"{message}; {idle}",
            "add nodes, or ask for fewer (spec.nodes)",
            f"{_more(missing)} that can take a pod ({idle})",
        )
    wanting: dict[str, list[str]] = defaultdict(list)
    for node, (resource, _) in lacking.items():
        wanting[resource].append(node)
    who = [who_holds(others, frozenset(nodes), resource, request(pod, resource)) for resource, nodes in wanting.items()]
    return Finding(SECTION, Outcome.WAITS, message, "; ".join(filter(None, who)), f"room on {_more(missing)}")


def _only(count: int) -> str:
    return f"only {count}" if count else "none"


def _more(count: int) -> str:
    return f"{count} more node{'s' if count > 1 else ''}"


def _obstacles(why: Mapping[str, str]) -> Iterator[Finding]:
    groups: dict[str, list[str]] = defaultdict(list)
    for node, text in why.items():
        groups[text].append(node)
    for text, nodes in groups.items():
        yield Finding(SECTION, Outcome.NOTE, f"{named(nodes)}: {text}")


def _lacking(pod: Object, nodes: Iterable[Object], others: Iterable[Object]) -> dict[str, tuple[str, str]]:
    """Node → the first resource of which it has too little left, and that in words. Devices come before CPU and memory."""
    on: dict[str, list[Object]] = defaultdict(list)
    for other in others:
        if other["spec"].get("nodeName") and other.get("status", {}).get("phase") not in OVER:
            on[str(other["spec"]["nodeName"])].append(other)
    lacking: dict[str, tuple[str, str]] = {}
    for node in nodes:
        name = _name(node)
        for resource in (*asked(pod), PODS):
            want = request(pod, resource)
            free = allocatable(node, resource) - sum((request(other, resource) for other in on[name]), Decimal(0))
            if free < want:
                left, all_of_it = shown_amount(max(free, Decimal(0)), resource), shown_amount(allocatable(node, resource), resource)
                lacking[name] = (resource, f"has {left} of {all_of_it} {resource} free, a pod asks for {shown_amount(want, resource)}")
                break
    return lacking


def _name(node: Object) -> str:
    return str(node["metadata"]["name"])
