"""Times of the gang: how points in time are written (RFC 3339, whole seconds, UTC), and how long its ends wait for each other."""

from __future__ import annotations

from datetime import datetime, timezone

PING_SECONDS = 5.0
"""The coordinator speaks to every agent at least this often, and is answered."""

UNHEARD_SECONDS = 7.5
"""A node that was not heard for so long is reported, and no rank is judged meanwhile: it would have answered by now."""

SILENCE_SECONDS = 30.0
"""An end that was not heard for so long is gone: an agent stops its ranks and waits, the coordinator stops the attempt."""

RECONNECT_SECONDS = 5.0
"""A connection that was closed, not just silent, may come back within this; a dead process closes its connections at once."""

RECONNECTS_A_SECOND = 128
"""A gang whose connections were all lost comes back at this rate, each agent at a moment of its own: a proof takes its time."""

AT_ONCE = 64
"""Agents that may connect at once."""

PROGRESS_SECONDS = (2.0, 10.0)
"""Seconds over which an agent puts together what its ranks say of their progress: the least, and the most for a gang of very many ranks."""

RANKS_A_SECOND = 820
"""Ranks whose progress is sent in a second."""


def stamp(now: float) -> str:
    """Unix seconds as text."""
    return datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: UP017 (datetime.UTC is Python 3.11)


def seconds_of(stamp: str | None) -> float | None:
    """Unix seconds of a stamp; None for none, and for what is no stamp."""
    try:
        return None if stamp is None else datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def reconnect_seconds(nodes: int) -> float:
    """Seconds that a closed connection may take to come back in a gang of so many nodes."""
    return RECONNECT_SECONDS + spread_seconds(nodes)


def spread_seconds(nodes: int) -> float:
    """Seconds over which the agents of a gang connect again: a small one at once."""
    return max(0, nodes - AT_ONCE) / RECONNECTS_A_SECOND


def progress_seconds(ranks: int) -> float:
    """Seconds that the progress of ranks waits to be sent together, in a gang of so many ranks."""
    least, most = PROGRESS_SECONDS
    return min(max(least, ranks / RANKS_A_SECOND), most)
