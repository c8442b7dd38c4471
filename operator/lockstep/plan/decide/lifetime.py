"""How long a job may be active, and how long it stays after its end (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.api.job import TrainingJobSpec
from lockstep.api.model import Model
from lockstep.api.status import ActiveTime, unchecked
from lockstep.plan.decide.retry import asked
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.reasons import Reason
from lockstep.plan.times import age, not_ahead, remaining, seconds_of, timestamp
from lockstep.plan.waiting.containers import is_scheduled
from lockstep_gang.contract import State

_BY_THE_OPERATOR = ("suspend", "active_deadline_seconds", "ttl_seconds_after_finished", "notify")
_RESTARTS_BY_THE_OPERATOR = ("lost_node_seconds", "hold_on_failure_seconds")


def without_operator(spec: TrainingJobSpec) -> list[str]:
    """Fields of the job's life and its end that are set, and that nobody carries out where no operator is."""
    return [*_set_fields(spec, "spec", _BY_THE_OPERATOR), *_set_fields(spec.restart, "spec.restart", _RESTARTS_BY_THE_OPERATOR)]


def _set_fields(part: Model, path: str, names: tuple[str, ...]) -> Iterator[str]:
    fields = type(part).model_fields
    yield from (f"{path}.{fields[name].alias}" for name in names if getattr(part, name) != fields[name].default)


def active_time(observed: Observed, now: float) -> ActiveTime | None:
    """Return status.active: counted while any pod of the job is on a node, so neither suspended nor queued time is in it. A retry starts anew."""
    retry = asked(observed)
    before = ActiveTime.stored(observed.status.get("active"))
    if before is None or retry != (before.retry or 0):
        before = unchecked(ActiveTime)
    since = not_ahead(before.since, now)
    is_active = any(map(is_scheduled, observed.pods))
    counted = unchecked(
        ActiveTime,
        retry=retry or None,
        since=since or (timestamp(now) if is_active else None),
        earlier_seconds=before.earlier_seconds,
    )
    return counted if is_active else ended_active_time(counted, now)


def ended_active_time(active: ActiveTime | None, now: float) -> ActiveTime | None:
    """Return the same once no time counts: no pod is on a node, or those of a job that has ended are on their way out."""
    seconds = round(active_seconds(active, now))
    return unchecked(ActiveTime, retry=active.retry, earlier_seconds=seconds) if active is not None and seconds else None


def active_seconds(active: ActiveTime | None, now: float) -> float:
    """Seconds that have been counted until now."""
    if active is None:
        return 0.0
    return active.earlier_seconds + (0.0 if active.since is None else age(seconds_of(active.since), now))


def overdue(observed: Observed, active: ActiveTime | None, now: float) -> Notice | None:
    """That spec.activeDeadlineSeconds is over, as the failure says it."""
    deadline = observed.job["spec"].get("activeDeadlineSeconds")
    if deadline is None or active_seconds(active, now) < deadline:
        return None
    return Notice(Reason.DEADLINE_EXCEEDED, f"pods of the job were on nodes for the {deadline} s of spec.activeDeadlineSeconds")


def until_overdue(observed: Observed, active: ActiveTime | None, now: float) -> float | None:
    """Seconds; None: no clock runs."""
    deadline = observed.job["spec"].get("activeDeadlineSeconds")
    if deadline is None or active is None or active.since is None:
        return None
    left = deadline - active_seconds(active, now)
    return max(left, 0.0) + 0.1 if left > 0 else None


def until_expired(observed: Observed, now: float) -> float | None:
    """Seconds until the job is to be deleted, at most 0 when it is now; None: it stays, or its end isn't in status yet."""
    ttl = observed.job["spec"].get("ttlSecondsAfterFinished")
    ended = observed.status.get("completionTime")
    if ttl is None or ended is None:
        return None
    return remaining(seconds_of(ended), float(ttl), now)


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
