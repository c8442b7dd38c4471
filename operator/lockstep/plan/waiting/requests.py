"""Resources that a pod takes of a node, counted as the scheduler counts (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from lockstep.api.objects import Object
from lockstep.api.quantity import number

PODS = "pods"
"""A node takes only so many."""


def asked(pod: Object) -> list[str]:
    """Resources that the pod asks for, devices before CPU and memory: they say more about which nodes were meant."""
    spec = pod["spec"]
    names = {
        name
        for c in (*spec.get("containers", []), *(spec.get("initContainers") or []), {"resources": {"requests": spec.get("overhead")}})
        for name in (c.get("resources", {}).get("requests") or {})
    }
    return sorted((name for name in names if request(pod, name)), key=lambda name: ("/" not in name, name))


def request(pod: Object, resource: str) -> Decimal:
    """Amount as the scheduler counts it: the containers together with sidecars, or the largest init container with the sidecars before it, and the pod's overhead."""
    if resource == PODS:
        return Decimal(1)
    return effective(pod, resource, "requests") + _of((pod["spec"].get("overhead") or {}), resource)


def effective(pod: Object, resource: str, which: str) -> Decimal:
    """`which`: requests or limits."""
    spec = pod["spec"]
    together = sum((_stated(container, resource, which) for container in spec.get("containers", [])), Decimal(0))
    sidecars = largest = Decimal(0)
    for container in spec.get("initContainers") or []:
        own = _stated(container, resource, which)
        if container.get("restartPolicy") == "Always":
            sidecars += own
            largest = max(largest, sidecars)
        else:
            largest = max(largest, sidecars + own)
    return max(together + sidecars, largest)


def _stated(container: Object, resource: str, which: str) -> Decimal:
    return _of((container.get("resources") or {}).get(which) or {}, resource)


def _of(amounts: Mapping[str, object], resource: str) -> Decimal:
    return number(amounts.get(resource))
