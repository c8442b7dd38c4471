"""Points in time as reports and records write them: RFC 3339, whole seconds, UTC."""

from __future__ import annotations

from datetime import datetime, timezone


def stamp(now: float) -> str:
    """Unix seconds as text."""
    return datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: UP017 (datetime.UTC is Python 3.11)


def seconds_of(stamp: str | None) -> float | None:
    """Unix seconds of a stamp; None for none, and for what is no stamp."""
    try:
        return None if stamp is None else datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
