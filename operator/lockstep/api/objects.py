"""Kubernetes objects as plain dicts: what can be asked of any of them. Imports nothing, so that help pages stay fast."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
DEPTH_MAX = 64
"""Levels of lists and maps that an object may have. JSON has no limit, and every reader has one somewhere."""
TOO_DEEP = f"(deeper than {DEPTH_MAX} levels)"
"""Stands where an object was cut off."""


def condition(status: Object, kind: str) -> Object:
    """The condition of this type; empty when there is none yet."""
    return next((item for item in status.get("conditions") or [] if item["type"] == kind), {})


def is_true(status: Object, kind: str) -> bool:
    return bool(condition(status, kind).get("status") == "True")


def has_ended(job: Object) -> bool:
    """Return True if the TrainingJob has completed or failed."""
    return any(is_true(job.get("status") or {}, kind) for kind in ("Complete", "Failed"))


def is_running(pod: Object) -> bool:
    """Return True if all containers of a pod run."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return bool(statuses) and all("running" in status.get("state", {}) for status in statuses)
