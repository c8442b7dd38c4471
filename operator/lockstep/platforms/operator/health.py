"""Health of this process, for `/healthz` and the liveness probe that asks there.

Unhealthy is only what a new process would mend: a loop that has stopped, work that doesn't end, a login or a certificate that the API server
no longer takes. An API server that doesn't answer, or answers with 429 or 5xx, is nothing of that: it is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

STUCK_SECONDS = 900.0
"""Seconds without any sign. A watch begins anew every five minutes, a request takes half a minute at most, a job a few of them."""
REFUSED_SECONDS = 300.0
"""Credentials are read again before: a token that is renewed in its file is at most a minute old."""
RESYNC_SECONDS_MAX = 3600.0
"""Lists of everything are asked for every ten minutes."""


@dataclass(frozen=True)
class Signs:
    """Signs of life of the loops of a replica that leads; times are time.monotonic."""

    leads_since: float | None = None
    """Start of the leadership; None if it doesn't lead, and none of the loops runs."""
    working_seconds: float = 0.0
    """Seconds since the oldest piece of work began."""
    waiting: int = 0
    """Jobs that wait for a worker."""
    worked: float = 0.0
    """Time at which a piece of work last ended."""
    listed: float = 0.0
    """Time at which everything was last listed; 0: never yet."""
    watched: Mapping[str, float] = field(default_factory=dict)
    """Plural of the kind → when its watch last asked for something or heard something."""
    refused_since: float | None = None
    """Time since which the API server only refuses this process's credentials, or shows a certificate that isn't trusted."""
    answers: bool = True
    """True if the last request was answered."""


def problem(signs: Signs, now: float) -> str:
    """Return the problem that a new process would mend; '' for a healthy one."""
    return next(_problems(signs, now), "")


def _problems(signs: Signs, now: float) -> Iterator[str]:
    if signs.refused_since is not None and now - signs.refused_since > REFUSED_SECONDS:
        yield "the API server refuses this process's credentials, or shows a certificate that it doesn't trust"
    if signs.leads_since is None:
        return
    if signs.working_seconds > STUCK_SECONDS:
        yield f"work on one job has not ended in {signs.working_seconds:.0f} s"
    if signs.waiting and now - max(signs.worked, signs.leads_since) > STUCK_SECONDS:
        yield f"{signs.waiting} jobs wait, and no work has ended in {now - signs.worked:.0f} s"
    for plural, seen in signs.watched.items():
        if now - seen > STUCK_SECONDS:
            yield f"the watch of {plural} has been silent for {now - seen:.0f} s"
    if signs.answers and now - max(signs.listed, signs.leads_since) > RESYNC_SECONDS_MAX:
        yield "the cluster could not be listed for an hour, though the API server answers"
