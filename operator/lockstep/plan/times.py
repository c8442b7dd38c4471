"""Points in time, as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(seconds: float) -> str:
    """RFC 3339, whole seconds, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str) -> float:
    """Seconds since 1970 of what `timestamp` or the API server wrote. Raises ValueError."""
    return datetime.fromisoformat(text).timestamp()
