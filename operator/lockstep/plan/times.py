"""Points in time, as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(seconds: float) -> str:
    """RFC 3339, whole seconds, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str) -> float:
    """Seconds since 1970 of what `timestamp` or the API server wrote. Raises ValueError."""
    return datetime.fromisoformat(text).timestamp()


def age(then: float, now: float) -> float:
    """Seconds since then; 0 for a time that lies ahead: whoever wrote it had another clock."""
    return max(0.0, now - then)


def remaining(since: float, seconds: float, now: float) -> float:
    """Seconds left of so many since then, negative once they are over; never more than all of them."""
    return min(seconds, since + seconds - now)


def not_ahead(text: str | None, now: float) -> str | None:
    """A stored time, or now where it lies ahead: it was stored by a clock that was fast, and what counts from it would begin only then."""
    return timestamp(now) if text is not None and seconds_of(text) > now + 1 else text
