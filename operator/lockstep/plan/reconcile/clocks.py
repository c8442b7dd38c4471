"""Clocks of a job (pure): retries, the start from zero pods, active time, and what stays after the end.

Retry: a Failed job starts again from its last commit when restart.retry is raised. The number is frozen into every start, and an end counts
for its own number and higher ones only. So whoever raises it needs no further step, and an operator that ends in between loses nothing.

Start: it counts until its first attempt begins. A pod of node 0 that has never run can't give up a start, so the operator does; from then
on the coordinator counts the time. Until then a corrected spec replaces the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.api.job import TrainingJob, TrainingJobSpec
from lockstep.api.model import Model
from lockstep.api.names import ANNOTATION_ATTEMPTS_BEFORE
from lockstep.api.objects import Object, condition, is_running, is_true
from lockstep.api.status import ActiveTime
from lockstep.api.statuspart import unchecked
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, ReceivedReport, current_report, is_terminating
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.accept import Accepted, missing_service_account
from lockstep.plan.reconcile.interactive import is_interactive
from lockstep.plan.render.objects import Frozen, differs_by_user
from lockstep.plan.times import age, not_ahead, remaining, seconds_of, timestamp
from lockstep.plan.waiting.containers import is_scheduled, placed_at, waits_for_a_claim, why_not_started
from lockstep.plan.waiting.unscheduled import why_unscheduled
from lockstep_gang.contract.report import State
from lockstep_spec.choices import Timeouts


@dataclass(frozen=True)
class Earlier:
    """A start that failed, where no operator keeps a job: who goes on from it has its uid, so that attempts and history are one."""

    uid: str
    retry: int


def retried(job: TrainingJob, earlier: Earlier) -> TrainingJob:
    """The job as it starts again after `earlier`."""
    restart = job.spec.restart.model_copy(update={"retry": max(earlier.retry + 1, job.spec.restart.retry)})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"restart": restart})})


def retry_of(running: Frozen) -> int:
    return running.parsed.restart.retry


def is_retried(observed: Observed, running: Frozen | None) -> bool:
    """Return True if the failure in status no longer counts: the job is at zero pods, or its next start is already there."""
    counted = int(observed.status.get("retry", 0))
    return observed.requested_retry > counted and (
        observed.at_zero or (running is not None and retry_of(running) >= observed.requested_retry)
    )


def is_of_an_earlier_retry(observed: Observed, received: ReceivedReport) -> bool:
    """A report of a failure that was there before the retry and may still be in memory."""
    return received.report.state is State.FAILED and received.report.retry < observed.requested_retry


FRESH_SECONDS = 30.0
"""A report that is older doesn't say that no rank has been started since."""


def has_begun(observed: Observed, received: ReceivedReport | None, now: float) -> bool:
    """Return True if an attempt of the newest start has begun, or may have begun unheard. Until then a start can be replaced without
    loss.
    """
    attempts = int(observed.status.get("attempts") or 0)
    if received is not None:
        attempts = max(attempts, received.report.attempt)
    if attempts > attempts_before(observed):
        return True
    if is_interactive(observed.job):
        return any(map(is_running, observed.pods))  # people may be at work in them
    pod = observed.pod(0)
    if pod is None or not is_running(pod):
        return False  # nobody is there who could begin one
    current = current_report(observed, received)
    is_fresh = current is not None and now - current.received <= FRESH_SECONDS
    return current is None or not is_fresh or current.report.state is not State.WAITING


def attempts_before(observed: Observed) -> int:
    """Number of attempts when the newest start from zero pods began."""
    stateful_set = observed.stateful_set or {"metadata": {}}
    stated = str((stateful_set["metadata"].get("annotations") or {}).get(ANNOTATION_ATTEMPTS_BEFORE, ""))
    return int(stated) if re.fullmatch(r"\d{1,9}", stated) else 0


def start_mark(observed: Observed) -> dict[str, str]:
    """The StatefulSet's annotation for `attempts_before`: goes up with the pods in one write, so that no start is without it."""
    attempts = int(observed.status.get("attempts") or 0) if observed.at_zero else attempts_before(observed)
    return {ANNOTATION_ATTEMPTS_BEFORE: str(attempts)} if attempts else {}


def replaced_by(observed: Observed, accepted: Accepted, running: Frozen) -> str | None:
    """Return why a start that has not begun is replaced by what the job would start with now; None if it stays.

    What only the operator adds (its image, its certificate) counts where pods can't start: a queue of a thousand jobs survives an upgrade.
    """
    if accepted.frozen.hash == running.hash or missing_service_account(observed, accepted) is not None:
        return None
    if differs_by_user(running, accepted.frozen):
        return "spec or cluster changed before any rank ran, so the job starts again with the changes"
    return "the operator changed while the pods could not start, so they start again" if why_not_started(observed) is not None else None


def start_overdue(observed: Observed, now: float) -> Notice | None:
    """Return the failure if spec.startTimeoutSeconds is over while all pods of the job hold nodes, or would but for a claim."""
    left = until_start_overdue(observed, now)
    if left is None or left > 0:
        return None
    seconds = observed.job["spec"].get("startTimeoutSeconds", Timeouts.start_seconds)
    pod = observed.pod(0)
    why = why_not_started(observed) if pod is not None and is_scheduled(pod) else why_unscheduled(observed)
    detail = f": {why.message}" if why is not None else ""
    return Notice(Reason.START_TIMEOUT, f"node 0 did not start within the {seconds} s of startTimeoutSeconds{detail}")


def until_start_overdue(observed: Observed, now: float) -> float | None:
    """Seconds, at most 0 when it is; None: no clock runs.

    It begins when the last pod gets a node: waiting for room is no failure, and what is held meanwhile is let go of (`plan.placing`). A
    claim that isn't bound is no lack of room. A pod that has ended without a run (its kubelet would not have it) is the StatefulSet's to
    replace, and a new pod 0 has the whole time again.
    """
    pod = observed.pod(0)
    if pod is None or is_terminating(pod) or _has_ended(pod) or _has_run(pod):
        return None
    unplaced = [other for other in observed.pods if not is_scheduled(other)]
    if len(observed.pods) < observed.replicas or not all(map(waits_for_a_claim, unplaced)):
        return None
    created, placed = pod["metadata"].get("creationTimestamp"), [placed_at(other) for other in observed.pods if is_scheduled(other)]
    if created is None or not placed:
        return None
    begun = max(seconds_of(created), 0.0, *(at for at in placed if at <= now))  # the scheduler's clock may be fast
    return remaining(begun, float(observed.job["spec"].get("startTimeoutSeconds", Timeouts.start_seconds)), now)


def _has_ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def _has_run(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(status.get("restartCount") or "waiting" not in status.get("state", {"waiting": {}}) for status in statuses)


_BY_THE_OPERATOR = ("suspend", "active_deadline_seconds", "ttl_seconds_after_finished")
_RESTARTS_BY_THE_OPERATOR = ("lost_node_seconds", "hold_on_failure_seconds")


def without_operator(spec: TrainingJobSpec) -> list[str]:
    """Fields of the job's life and its end that are set, and that nobody carries out where no operator is."""
    return [*_set_fields(spec, "spec", _BY_THE_OPERATOR), *_set_fields(spec.restart, "spec.restart", _RESTARTS_BY_THE_OPERATOR)]


def _set_fields(part: Model, path: str, names: tuple[str, ...]) -> Iterator[str]:
    fields = type(part).model_fields
    yield from (f"{path}.{fields[name].alias}" for name in names if getattr(part, name) != fields[name].default)


def active_time(observed: Observed, now: float) -> ActiveTime | None:
    """Return status.active: counted while any pod of the job is on a node, so neither suspended nor queued time is in it. A retry starts
    anew.
    """
    retry = observed.requested_retry
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
    """Return the failure if spec.activeDeadlineSeconds is over."""
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
    """Return the time until which the pods stay, in seconds since the epoch; None if nothing holds them.

    The spec as it is now decides, and not the frozen run, so that a change ends a hold at once. It begins with the end that status
    tells, so an operator that was away doesn't prolong it. Pods that are gone don't come back for it.
    """
    seconds = int(observed.restart.get("holdOnFailureSeconds", 0))
    has_pods = observed.replicas > 0 and bool(observed.pods)
    is_over = observed.requested_retry > int(observed.status.get("retry", 0)) or observed.job["spec"].get("suspend", False)
    if is_over or not has_pods or seconds == 0 or not _ranks_failed(observed, received):
        return None
    ended = observed.status.get("completionTime")
    until = (now if ended is None else min(now, seconds_of(ended))) + seconds
    return until if until > now else None


def _ranks_failed(observed: Observed, received: ReceivedReport | None) -> bool:
    """Because of its ranks: a job that failed by a deadline, say, leaves nothing to look into."""
    if is_true(observed.status, "Failed"):
        return bool(condition(observed.status, "Failed")["reason"] == Reason.RANKS_FAILED)
    return not is_true(observed.status, "Complete") and received is not None and received.report.state is State.FAILED
