"""Conditions as they stand in a status: of a job, a node, or anything else that has them. Imports nothing, so that help pages stay fast."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def condition(status: Object, kind: str) -> Object:
    """The condition of this type; empty when there is none yet."""
    return next((found for found in status.get("conditions") or [] if found["type"] == kind), {})


def is_true(status: Object, kind: str) -> bool:
    return bool(condition(status, kind).get("status") == "True")
