"""Nodes that preflight found bad for a job: noted in status, then left out of the job's next start from zero (pure).

Only what can be replaced is left out: with no other node free to take the pod, the job would wait for ever instead of failing with the
node's name. Status has the list first, the pods go after that, so that an operator that ends in between loses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.api.status import EXCLUDED_MAX, ExcludedNode
from lockstep.api.statuspart import unchecked
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.interactive import is_stopped
from lockstep.plan.waiting.nodes import fitting_nodes
from lockstep_gang.contract.preflight import Finding
from lockstep_gang.contract.report import Report

if TYPE_CHECKING:
    from lockstep.plan.render.objects import Frozen


def excluded_names(observed: Observed) -> tuple[str, ...]:
    """Names of the excluded nodes in status."""
    return tuple(node["name"] for node in observed.status.get("excludedNodes") or [])


def excluded_nodes(observed: Observed, report: Report | None, running: Frozen | None, time: str) -> list[ExcludedNode]:
    """Return status.excludedNodes. Suspending a job clears the list."""
    if is_stopped(observed):
        return []
    excluded = [node for item in observed.status.get("excludedNodes") or [] if (node := ExcludedNode.stored(item)) is not None]
    bad = _bad_nodes(observed, report) if running is not None else {}
    for name, finding in bad.items():
        others = {node.name for node in excluded}
        is_new = name not in others and len(excluded) < EXCLUDED_MAX
        if is_new and running is not None and _enough_without(observed, others | {name}, running.nodes):
            excluded.append(unchecked(ExcludedNode, name=name, time=time, message=finding.message))
    return excluded


def pods_on_excluded(observed: Observed) -> str | None:
    """Return why the present pods have to go: one of them is on a node that has been excluded since."""
    left_out = {node["name"]: node["message"] for node in observed.status.get("excludedNodes") or []}
    there = sorted({pod["spec"].get("nodeName") for pod in observed.pods} & set(left_out))
    return f"the job starts again without node {there[0]}: {left_out[there[0]]}" if there else None


def _bad_nodes(observed: Observed, report: Report | None) -> dict[str, Finding]:
    """Node → preflight's finding, from the pods that were there at the time."""
    result = report.preflight if report is not None else None
    found: dict[str, Finding] = {}
    for finding in result.findings if result is not None and not result.ok else ():
        pod = observed.pod(finding.node) if finding.excludes and finding.node is not None else None
        if pod is not None and result is not None and pod["metadata"].get("creationTimestamp", "") <= result.time:
            found[pod["spec"].get("nodeName", "")] = finding
    return {name: finding for name, finding in found.items() if name}


def _enough_without(observed: Observed, left_out: set[str], wanted: int) -> bool:
    fitting = set(fitting_nodes(observed.pods[0], observed.nodes)) if observed.pods else set()
    return len(fitting - left_out) >= wanted
