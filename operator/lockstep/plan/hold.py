"""Pods of a job that failed for good stay a while for `kubectl exec`: `restart.holdOnFailureSeconds` (pure)."""

from __future__ import annotations

from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.retry import asked
from lockstep.plan.times import seconds_of
from lockstep_gang.contract import State


def held_until(observed: Observed, received: ReceivedReport | None, now: float) -> float | None:
    """Until when the pods stay, in seconds since the epoch; None: nothing holds them.

    Asked of the spec as it is now and not of the frozen run, so that a change ends a hold at once. It begins with the end that status
    tells, so an operator that was away doesn't prolong it. Pods that are gone don't come back for it.
    """
    spec = observed.job["spec"]
    seconds = int((spec.get("restart") or {}).get("holdOnFailureSeconds", 0))
    there = observed.replicas > 0 and bool(observed.pods)
    retried = asked(observed) > int(observed.status.get("retry", 0))
    if retried or not there or seconds == 0 or spec.get("suspend", False) or not _ranks_failed(observed, received):
        return None
    ended = observed.status.get("completionTime")
    until = (now if ended is None else min(now, seconds_of(ended))) + seconds
    return until if until > now else None


def _ranks_failed(observed: Observed, received: ReceivedReport | None) -> bool:
    """Because of its ranks: a job that failed by a deadline, say, leaves nothing to look into."""
    known = {c["type"]: c for c in observed.status.get("conditions", []) if c["status"] == "True"}
    if "Failed" in known:
        return bool(known["Failed"]["reason"] == "RanksFailed")
    return "Complete" not in known and received is not None and received.report.state is State.FAILED
