"""Fields that stored objects would lose to the CRD of another version, older or newer (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lockstep.api.objects import Object
from lockstep.plan.ship.deploy import called
from lockstep_spec.words import listed

SHOWN = 20
KEPT = ("apiVersion", "kind", "metadata")
PRESERVES = "x-kubernetes-preserve-unknown-fields"


def lost_fields(item: Object, schema: Object) -> list[str]:
    """Paths that the API server would prune from `item` by a CRD's openAPIV3Schema. `[]` is any item of a list."""
    return list(dict.fromkeys(_pruned({key: value for key, value in item.items() if key not in KEPT}, schema, "")))


def _pruned(value: Any, schema: Object, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value if "items" in schema else []:
            yield from _pruned(item, schema["items"], f"{path}[]")
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, inner in value.items():
            place = f"{path}.{key}" if path else key
            if key in known or others is not None:
                yield from _pruned(inner, known.get(key, others), place)
            elif not schema.get(PRESERVES):
                yield place


def loss_lines(items: Iterable[Object], schema: Object) -> list[str]:
    """A sentence about each object that would lose fields."""
    return [f"{called(item)} would lose {listed(fields)}" for item in items if (fields := lost_fields(item, schema))]


def shown_lines(lines: Sequence[str]) -> list[str]:
    """At most SHOWN lines, and how many more there are."""
    return [*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]
