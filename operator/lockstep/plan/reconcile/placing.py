"""A gang that can't be placed as a whole lets go of the nodes that it holds, and tries again (pure).

Two jobs that hold half of what each needs would wait for each other for ever. So a job that holds some nodes, and finds no others for a
while, scales to zero and comes back later. What guarantees progress:

- Of all jobs that hold part of their nodes, one has its turn: it holds them for twice as long as the others. They let go, make no pods
  until it is placed or has let go too, and so do jobs that hold nothing yet: what is freed is the first one's. It is one of the highest
  priority, of the namespace whose turn it is, there the one that was created first. Namespaces take turns of some minutes, so that no
  tenant keeps the others' jobs out of the scheduler's queue, however many jobs it has.
- Only jobs count that could use the same nodes, and what is in their status counts only while it is true: they have pods on nodes, and the
  time of their release is to come.
- Nobody holds part of its nodes for ever, and each release keeps a job away for longer. So a job that no node fits doesn't keep off the
  others.
- Times differ by a hash of the job's uid, so that two jobs don't move in step.

Without a job before it that gathers its nodes, one that holds none waits with pending pods, for as long as it takes. Gang schedulers and
Kueue place all or nothing: none of this happens with them. All state is in status.placement, so another leader goes on from there.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.api.objects import Object, has_ended
from lockstep.api.status import PlacementStatus
from lockstep.api.statuspart import unchecked
from lockstep.plan.observed import Observed, is_terminating
from lockstep.plan.reconcile.interactive import is_interactive, is_stopped
from lockstep.plan.times import seconds_of, timestamp
from lockstep.plan.waiting.containers import is_scheduled, placed_at, waits_for_room
from lockstep.plan.waiting.nodes import contend
from lockstep.plan.waiting.notcreated import why_not_created
from lockstep.plan.waiting.unscheduled import is_gated

HOLD_SECONDS = 60.0
"""A job that waits for its last nodes holds the others for so long while another job waits too: a pod that was replaced is back by then."""
HOLD_ALONE_SECONDS = 600.0
"""The same while no other job waits: an autoscaler has brought a node by then, and strangers' pods may want the nodes."""
AWAY_SECONDS = (30.0, 300.0)
"""Seconds without pods after the first release, and at most; doubled in between."""
TURN_SECONDS = 3 * HOLD_SECONDS
"""Seconds that a namespace has its turn, and that a job stays away longer for one before it that holds part of its nodes: that has them
within two holds, or releases them.
"""
JUDGED_MAX = 8
"""Jobs of a namespace that are looked at, the first ones: one tenant may have thousands."""
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
    others = _contenders(observed, now)
    if placed == 0 and _has_others_turn(observed, others, now):
        return _release(observed, placed, wanted, releases or 0, "an earlier job is gathering its nodes", now)
    due = since + _hold_seconds(observed, others, before, now)
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
    again = min(due - now, LOOK_SECONDS) if holds_some else _until_next_turn(observed, others, now)
    return Placing(status, message=holding_words(status), again_seconds=again)


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
    if left > -TURN_SECONDS and _has_others_turn(observed, _contenders(observed, now), now):
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
    """Return True if a TrainingJob that has not ended waits for nodes, or has released some."""
    status = job.get("status") or {}
    return "wanted" in (status.get("placement") or {}) and not has_ended(status)


def contender(job: Mapping[str, Any], pods: Sequence[Object], template: Object | None) -> Object:
    """The part of an unplaced TrainingJob that others have to know, with one of its pods: they are alike, but whoever makes others of their
    names only shows what has a node. A job without pods has their template.
    """
    metadata = {key: job["metadata"].get(key, "") for key in ("namespace", "uid", "creationTimestamp")}
    shown = sorted(pods, key=is_scheduled, reverse=True)
    gathers = bool(shown) and is_scheduled(shown[0]) and not is_scheduled(shown[-1])
    placement = job["status"]["placement"]
    known = {"holds": gathers, "has_pods": bool(shown), "pod": shown[0] if shown else template}
    return {"metadata": metadata, "status": {"placement": placement}, **known}


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


def _hold_seconds(observed: Observed, others: Sequence[Object], before: PlacementStatus, now: float) -> float:
    jitter = _spread(observed, "hold", before.releases or 0)
    if observed.waiting is None:  # nobody here sees who else waits
        start = observed.job["spec"].get("startTimeoutSeconds")
        hold = HOLD_SECONDS * (1.0 + jitter)
        return hold if start is None else min(hold, start / 2)
    if not others:
        return HOLD_ALONE_SECONDS
    has_its_turn = not _has_others_turn(observed, others, now) and any(_has_news(other, now) for other in others)
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


def _pod(observed: Observed) -> Object | None:
    """A pod of the job as it is, or as it would be; they are alike."""
    template: Object | None = ((observed.stateful_set or {}).get("spec") or {}).get("template")
    return observed.pods[0] if observed.pods else template


def _contenders(observed: Observed, now: float) -> list[Object]:
    """Other jobs that wait for nodes which this one could use."""
    by_namespace: dict[str, list[Object]] = defaultdict(list)
    for other in observed.waiting or ():
        by_namespace[_namespace(other)].append(other)
    mine, first = _pod(observed), list[Object]()
    for jobs in by_namespace.values():
        first += sorted(jobs, key=lambda job: (-_priority(job.get("pod")), _age(job)))[:JUDGED_MAX]
    return [one for one in first if _is_there(one, now) and (mine is None or "pod" not in one or contend(mine, one["pod"], observed.nodes))]


def _is_there(job: Object, now: float) -> bool:
    """Return True if it has pods, or none because it has released its nodes lately."""
    retry = _placement(job).retry_time
    is_due = retry is not None and now - TURN_SECONDS < seconds_of(retry) <= now + 1.5 * AWAY_SECONDS[1]
    return job.get("has_pods", True) or (job["pod"] is not None and is_due)


def _has_others_turn(observed: Observed, others: Sequence[Object], now: float) -> bool:
    """Return True if a job that gathers its nodes comes before this one: by its priority, its namespace's turn, then its age."""
    mine = None if not observed.pods else _priority(observed.pods[0])
    holders = [other for other in others if _holds(other, now)]
    if mine is not None and any(_priority(other.get("pod")) > mine for other in holders):
        return True
    equals = [other for other in holders if mine is None or _priority(other.get("pod")) == mine]
    namespaces = sorted({observed.namespace, *map(_namespace, equals)})
    turn = namespaces[int(now // TURN_SECONDS) % len(namespaces)]
    of_turn = [other for other in equals if _namespace(other) == turn]
    return bool(of_turn) if turn != observed.namespace else any(_age(other) < _age(observed.job) for other in of_turn)


def _until_next_turn(observed: Observed, others: Sequence[Object], now: float) -> float | None:
    """Return the seconds until another namespace may have its turn, a few more for some jobs; None if only this one's jobs gather nodes."""
    if all(_namespace(other) == observed.namespace or not _holds(other, now) for other in others):
        return None
    return TURN_SECONDS - now % TURN_SECONDS + LOOK_SECONDS * _spread(observed, "turn", 0)


def _namespace(job: Object) -> str:
    return str(job["metadata"].get("namespace", ""))


def _priority(pod: Object | None) -> int:
    return int(((pod or {}).get("spec") or {}).get("priority") or 0)


def _placement(job: Object) -> PlacementStatus:
    return PlacementStatus.stored(job["status"]["placement"]) or unchecked(PlacementStatus)


def _holds(job: Object, now: float) -> bool:
    """Return True if it holds part of its nodes for a time that isn't long over, and isn't longer than the operator gives anybody."""
    release = _placement(job).release_time
    is_due = release is not None and now - HOLD_SECONDS < seconds_of(release) <= now + HOLD_ALONE_SECONDS
    return is_due and bool(job.get("holds", True))


def _has_news(job: Object, now: float) -> bool:
    """Return True if it holds part of its nodes, or has just released them and the scheduler gives them out."""
    retry = _placement(job).retry_time
    return _holds(job, now) or (retry is not None and seconds_of(retry) > now)
