"""A gang that can't be placed as a whole lets go of the nodes that it holds, and tries again (pure).

Two jobs that hold half of what each needs would wait for each other for ever. So a job that holds some nodes, and finds no others for a
while, scales to zero and comes back later. What guarantees progress:

- Of all jobs that hold part of their nodes, the one that was created first has its turn: it holds them for twice as long as the others.
  They let go, make no pods until it is placed or has let go too, and so do jobs that hold nothing yet: what is freed is the first one's.
- Nobody holds part of its nodes for ever, and each release keeps a job away for longer. So a job that no node fits doesn't keep off the
  others.
- Times differ by a hash of the job's uid, so that two jobs don't move in step.

Without an earlier job that gathers its nodes, one that holds none waits with pending pods, for as long as it takes. Gang schedulers and
Kueue place all or nothing: none of this happens with them. All state is in status.placement, so another leader goes on from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.api.objects import Object
from lockstep.api.status import PlacementStatus
from lockstep.api.statuspart import unchecked
from lockstep.plan.observed import Observed, is_terminating
from lockstep.plan.reconcile.interactive import is_interactive, is_stopped
from lockstep.plan.times import seconds_of, timestamp
from lockstep.plan.waiting.containers import is_scheduled, placed_at, waits_for_room
from lockstep.plan.waiting.notcreated import why_not_created
from lockstep.plan.waiting.unscheduled import is_gated

HOLD_SECONDS = 60.0
"""A job that waits for its last nodes holds the others for so long while another job waits too: a pod that was replaced is back by then."""
HOLD_ALONE_SECONDS = 600.0
"""The same while no other job waits: an autoscaler has brought a node by then, and strangers' pods may want the nodes."""
AWAY_SECONDS = (30.0, 300.0)
"""Seconds without pods after the first release, and at most; doubled in between."""
TURN_SECONDS = 3 * HOLD_SECONDS
"""Seconds that a job stays away longer for an earlier one that holds part of its nodes: that has them within two holds, or releases them.
"""
LOOK_SECONDS = 10.0
"""Other jobs come and go meanwhile."""


@dataclass(frozen=True)
class Placing:
    """State of a job's nodes; nothing is set while all of its pods have one, or none is wanted."""

    status: PlacementStatus | None = None
    lets_go: bool = False
    """True if its pods are to go now, or are going."""
    is_away: bool = False
    """True if it has released its nodes, and creates no pods yet."""
    message: str = ""
    """For a person, stable while nothing changes."""
    again_seconds: float | None = None


def placing(observed: Observed, now: float) -> Placing:
    """Return where a job that has not ended stands with its nodes."""
    if is_stopped(observed):
        return Placing()
    before = PlacementStatus.stored(observed.status.get("placement")) or unchecked(PlacementStatus)
    if observed.replicas == 0:
        return _without_replicas(observed, before, now)
    return _with_replicas(observed, before, now)


def _with_replicas(observed: Observed, before: PlacementStatus, now: float) -> Placing:
    placed, wanted = sum(is_scheduled(pod) and not is_terminating(pod) for pod in observed.pods), observed.replicas
    if placed >= wanted:
        return Placing()
    releases = before.releases or None
    if not _lacks_room(observed) or (placed == 0 and all(map(is_gated, observed.pods))):
        return Placing(unchecked(PlacementStatus, releases=releases) if releases else None)
    since = _since(before, placed, now)
    if placed == 0 and _earlier_holders(observed):
        return _release(observed, placed, wanted, releases or 0, "an earlier job is gathering its nodes", now)
    due = since + _hold_seconds(observed, before, now)
    holds_some = placed > 0 and not _is_in_use(observed)
    if holds_some and now >= due:
        why = f"held {placed} of {wanted} nodes for {now - since:.0f} s while the rest found none"
        return _release(observed, placed, wanted, releases or 0, why, now)
    status = unchecked(
        PlacementStatus,
        placed=placed,
        wanted=wanted,
        releases=releases,
        since=timestamp(since),
        release_time=timestamp(due) if holds_some else None,
    )
    return Placing(status, message=holding_words(status), again_seconds=min(due - now, LOOK_SECONDS) if holds_some else None)


def _without_replicas(observed: Observed, before: PlacementStatus, now: float) -> Placing:
    if before.retry_time is None and before.release_time is None:
        return Placing()
    if before.retry_time is None:  # scaled to zero, and then the operator ended before it could say so
        before = _released(observed, before.placed, before.wanted, before.releases or 0, now)
    words = f"released {_share(before)} nodes so that another job can run" if before.placed else "makes room for an earlier job"
    if observed.pods:
        return Placing(before, lets_go=True, message=words)
    releases, retry_time = before.releases or 0, str(before.retry_time)
    left = seconds_of(retry_time) - now
    if left > _away_seconds(observed, releases) + 1.0:
        left = 0.0  # by a clock that was ahead
    if left > 0:
        return Placing(before, is_away=True, message=f"{words}; tries again at {retry_time}", again_seconds=left)
    if left > -TURN_SECONDS and _earlier_holders(observed):
        text = f"{words}; tries again once an earlier job has its nodes, at {timestamp(now + left + TURN_SECONDS)} at the latest"
        return Placing(before, is_away=True, message=text, again_seconds=min(left + TURN_SECONDS, LOOK_SECONDS))
    return Placing(unchecked(PlacementStatus, releases=releases))


def _release(observed: Observed, placed: int, wanted: int, releases: int, why: str, now: float) -> Placing:
    what = "releases them so that another job can run" if placed else "this one, which holds none, creates no pods meanwhile"
    return Placing(_released(observed, placed, wanted, releases, now), lets_go=True, message=f"{why}, and {what}")


def _released(observed: Observed, placed: int, wanted: int, releases: int, now: float) -> PlacementStatus:
    """Return status.placement from here on; making room without having held any node is no release."""
    releases += placed > 0
    retry_time = timestamp(now + _away_seconds(observed, releases))
    return unchecked(PlacementStatus, placed=placed, wanted=wanted, releases=releases, retry_time=retry_time)


def holding_words(placement: PlacementStatus | None, now: float | None = None) -> str:
    """Return `holds 1 of 2 nodes; releases them in 40 s so that another job can run`; with the time of day if `now` is None; '' for a job
    that holds none.
    """
    if placement is None or placement.release_time is None:
        return ""
    left = None if now is None else max(0, round(seconds_of(placement.release_time) - now))
    when = f"at {placement.release_time}" if left is None else f"in {left} s"
    return f"holds {_share(placement)} nodes; releases them {when} so that another job can run"


def _share(placement: PlacementStatus) -> str:
    return f"{placement.placed} of {placement.wanted}"


def is_unplaced(job: Mapping[str, Any]) -> bool:
    """Return True if a TrainingJob waits for nodes, or has released some."""
    return "wanted" in ((job.get("status") or {}).get("placement") or {})


def contender(job: Mapping[str, Any]) -> Object:
    """The part of an unplaced TrainingJob that others have to know."""
    metadata = {key: job["metadata"].get(key, "") for key in ("uid", "creationTimestamp")}
    return {"metadata": metadata, "status": {"placement": job["status"]["placement"]}}


def _lacks_room(observed: Observed) -> bool:
    """Somebody has said that a pod of the job has to wait: the scheduler, a queue, or a quota."""
    lacking = len(observed.pods) < observed.replicas and why_not_created(observed) is not None
    return lacking or any(map(waits_for_room, observed.pods))


def _is_in_use(observed: Observed) -> bool:
    """A dev environment that had its nodes and has lost some, so that their pods are younger: people may be at work on the others."""
    if not is_interactive(observed.job):
        return False
    began = min((placed_at(pod) for pod in observed.pods if is_scheduled(pod)), default=0.0)
    return any(seconds_of(pod["metadata"].get("creationTimestamp", timestamp(0))) > began for pod in observed.pods if not is_scheduled(pod))


def _since(before: PlacementStatus, placed: int, now: float) -> float:
    """Time at which the job got its last node; now, if that is new, or was written by a clock that was ahead."""
    if before.since is None or placed > before.placed or seconds_of(before.since) > now:
        return now
    return seconds_of(before.since)


def _hold_seconds(observed: Observed, before: PlacementStatus, now: float) -> float:
    jitter = _spread(observed, "hold", before.releases or 0)
    if observed.waiting is None:  # nobody here sees who else waits
        start = observed.job["spec"].get("startTimeoutSeconds")
        hold = HOLD_SECONDS * (1.0 + jitter)
        return hold if start is None else min(hold, start / 2)
    if not observed.waiting:
        return HOLD_ALONE_SECONDS
    has_its_turn = not _earlier_holders(observed) and any(_contends(other, now) for other in observed.waiting)
    return HOLD_SECONDS * (1 + has_its_turn + jitter / 4)


def _away_seconds(observed: Observed, releases: int) -> float:
    first, most = AWAY_SECONDS
    return float(min(first * 2.0 ** min(max(releases - 1, 0), 16), most)) * (1.0 + _spread(observed, "away", releases) / 2)


def _spread(observed: Observed, what: str, number: int) -> float:
    """0 to 1, the same for the same job, and another for every job and every time."""
    digest = hashlib.sha256(f"{observed.uid} {what} {number}".encode()).digest()
    return int.from_bytes(digest[:4]) / 2**32


def _age(job: Object) -> tuple[str, str]:
    """Sorts jobs by their creation."""
    return str(job["metadata"].get("creationTimestamp", "")), str(job["metadata"]["uid"])


def _earlier_holders(observed: Observed) -> bool:
    """Return True if a job that was created earlier holds part of its nodes."""
    return any(_holds(other) and _age(other) < _age(observed.job) for other in observed.waiting or ())


def _holds(job: Object) -> bool:
    return "releaseTime" in job["status"]["placement"]


def _contends(job: Object, now: float) -> bool:
    """Return True if it holds part of its nodes, or has just released them and the scheduler gives them out."""
    retry = job["status"]["placement"].get("retryTime")
    return _holds(job) or (retry is not None and seconds_of(retry) > now)
