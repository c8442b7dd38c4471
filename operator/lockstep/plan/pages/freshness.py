"""Freshness of statuses: an operator that is away, doesn't lead or lacks rights writes none (pure).

The operator's Lease says when it last led. A status itself can't: it is written when something changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.api.names import ANNOTATION_TROUBLE
from lockstep.api.objects import Object, is_true
from lockstep.plan.pages.table import age
from lockstep.plan.times import seconds_of, timestamp
from lockstep_spec.words import printable_line

STALE_SECONDS = 30.0
"""Another replica leads 17 seconds after the last one's death, and clocks differ a little."""
CONDITION = "StatusCurrent"
"""Condition that `get` adds to a job of which nothing has been heard; the API server has none of this type."""


@dataclass(frozen=True)
class Unheard:
    """Statuses are not written any more."""

    since: str
    """RFC 3339."""
    why: str

    def text(self, now: float) -> str:
        return f"{self.why} since {self.since} ({age(self.since, now)} ago): what is shown is from before; lockstep doctor says more"


def unheard_of(lease: Mapping[str, Any], now: float) -> Unheard | None:
    """Silence that the operator's Lease shows; None: it leads, and works."""
    spec, annotations = lease.get("spec") or {}, lease["metadata"].get("annotations") or {}
    renewed = _seconds(spec.get("renewTime")) or _seconds(lease["metadata"].get("creationTimestamp"))
    if renewed is None:
        return None
    if now - renewed > STALE_SECONDS:
        holder = spec.get("holderIdentity")
        who = f"the operator ({printable_line(str(holder))[:80]}) has not been heard" if holder else "no operator has led"
        return Unheard(timestamp(renewed), who)
    since, _, lack = str(annotations.get(ANNOTATION_TROUBLE, "")).partition(" ")
    return Unheard(since, f"the operator lacks a right ({printable_line(lack)[:200]})") if lack and _seconds(since) is not None else None


def _seconds(stamp: object) -> float | None:
    try:
        return seconds_of(stamp) if isinstance(stamp, str) else None
    except ValueError:
        return None


def is_open(job: Object) -> bool:
    """True if the job has not ended, so that more is to be heard of it."""
    status = job.get("status") or {}
    return not (is_true(status, "Complete") or is_true(status, "Failed"))


def marked(job: Object, unheard: Unheard | None, now: float) -> Object:
    """The job as `get` prints it: one that is open, of which nothing has been heard, has CONDITION with status False."""
    if unheard is None or not is_open(job):
        return job
    status = job.get("status") or {}
    condition = {
        "type": CONDITION, "status": "False", "reason": "OperatorSilent", "message": unheard.text(now), "lastTransitionTime": unheard.since,
        "observedGeneration": status.get("observedGeneration", 0),
    }  # fmt: skip
    return {**job, "status": {**status, "conditions": [*(status.get("conditions") or []), condition]}}
