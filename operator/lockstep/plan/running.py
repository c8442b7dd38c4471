"""Whether a pod runs: by itself, because small verbs ask nothing else and the API's models take longer to import than they do (pure)."""

from __future__ import annotations

from typing import Any


def is_running(pod: dict[str, Any]) -> bool:
    """All its containers do."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return bool(statuses) and all("running" in status.get("state", {}) for status in statuses)
