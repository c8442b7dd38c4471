"""Differences between desired objects and observed ones.

Only fields that Lockstep sets are compared. What the API server fills in, spells in another way (quantities) or leaves out
(empty values) is no change: a change that isn't one would be sent again at every reconcile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from lockstep.api.names import LABEL_QUEUE
from lockstep.api.objects import Object
from lockstep.api.quantity import same_amount


class _Missing:
    def __repr__(self) -> str:
        return "(absent)"


MISSING: Final = _Missing()

_QUANTITY_PARENTS = ("requests", "limits")  # of CPU, memory, devices and claims
_QUANTITY_FIELDS = ("sizeLimit",)
_MUTABLE_SPEC = ("replicas", "template", "updateStrategy", "persistentVolumeClaimRetentionPolicy")


@dataclass(frozen=True)
class Change:
    """One field: where it is, for example `spec.template.spec.containers[0].image`, what it should be and what it is."""

    path: str
    desired: object
    observed: object


def shown(value: object, most: int) -> str:
    """Return a value for people, in at most so many characters."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (str, int, list, dict, type(None))) else repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def changes(desired: Object, observed: Object) -> list[Change]:
    """Every field of `desired` that `observed` has otherwise; [] means that there is nothing to send."""
    return list(_changes("", desired, observed, quantity=False))


def needs_recreation(desired: Object, observed: Object) -> bool:
    """Return True if a StatefulSet differs in a field that the API server does not let anybody change.

    Fields of spec are immutable there but for a few, of which Lockstep sets replicas, template, updateStrategy and the
    retention policy; Kueue lets nobody change its queue. Such a StatefulSet is deleted and created again, at zero pods.
    """
    if desired.get("kind") != "StatefulSet":
        return False
    fixed = {field: value for field, value in desired["spec"].items() if field not in _MUTABLE_SPEC}
    claims = desired["spec"].get("volumeClaimTemplates", [])
    surplus = len(observed.get("spec", {}).get("volumeClaimTemplates") or []) > len(claims)
    return surplus or _queue(desired) != _queue(observed) or bool(changes({"spec": fixed}, {"spec": observed.get("spec", {})}))


def _queue(stateful_set: Object) -> object:
    return (stateful_set["metadata"].get("labels") or {}).get(LABEL_QUEUE)


def _changes(path: str, desired: Any, observed: Any, *, quantity: bool) -> Iterator[Change]:
    if isinstance(desired, dict) and isinstance(observed, dict):
        for key, value in desired.items():
            inner = quantity or key in _QUANTITY_FIELDS
            yield from _changes(_join(path, key), value, observed.get(key, MISSING), quantity=inner or key in _QUANTITY_PARENTS)
    elif isinstance(desired, list) and isinstance(observed, list) and len(desired) == len(observed):
        for index, (value, other) in enumerate(zip(desired, observed, strict=True)):
            yield from _changes(f"{path}[{index}]", value, other, quantity=quantity)
    elif not _same(desired, observed, quantity=quantity):
        yield Change(path, desired, observed)


def _join(path: str, key: str) -> str:
    if not key.isidentifier():
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _same(desired: Any, observed: Any, *, quantity: bool) -> bool:
    if observed is MISSING or observed is None:
        return desired in ("", [], {}, None)  # the API server leaves these out of what it stores
    if desired == observed:
        return type(desired) is type(observed)
    return quantity and same_amount(desired, observed)
