"""Taints of nodes that keep pods off, and tolerations that let them in (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.api.objects import Object

HARD = ("NoSchedule", "NoExecute")
PASSING = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Kubernetes sets and takes away these by itself: not ready, cordoned, short of memory."""


def barring_taints(node: Object, tolerations: Sequence[Object]) -> list[Object]:
    """Those that keep off a pod with these tolerations, in the node's order."""
    taints = [taint for taint in node.get("spec", {}).get("taints") or [] if taint["effect"] in HARD]
    return [taint for taint in taints if not any(_tolerates(toleration, taint) for toleration in tolerations)]


def lasting_taints(node: Object, tolerations: Sequence[Object]) -> list[Object]:
    """Those of `barring_taints` that somebody has put there."""
    return [taint for taint in barring_taints(node, tolerations) if not taint["key"].startswith(PASSING)]


def shown_taint(taint: Object) -> str:
    """As `kubectl taint` takes it: dedicated=infra:NoSchedule."""
    return f"{taint['key']}{'=' + taint['value'] if taint.get('value') else ''}:{taint['effect']}"


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    same_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
    return bool(toleration["key"] == taint["key"]) and same_value
