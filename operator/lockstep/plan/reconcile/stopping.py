"""One stop for all that ends a gang's run early: suspend, a new size, the deadline. Whether it is due, and what came of it (pure).

The StatefulSet goes to zero, the kubelet tells every agent, ranks save and stop. A stop that has begun is finished before pods are made
again, so that a gang is never half of an old and half of a new start. Deleting the job does the same without the operator.
"""

from __future__ import annotations

from enum import StrEnum

from lockstep.api.objects import Object
from lockstep.api.status import StopStatus
from lockstep.api.statuspart import taken_from, unchecked
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, ReceivedReport, is_terminating
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.accept import Accepted, missing_service_account
from lockstep.plan.reconcile.clocks import attempts_before, replaced_by
from lockstep.plan.reconcile.interactive import is_released, is_stopped
from lockstep.plan.reconcile.placing import Placing
from lockstep.plan.render.objects import Frozen
from lockstep.plan.times import timestamp
from lockstep_gang.contract.report import CheckpointReport, Report, Save


class StopEvent(StrEnum):
    """Reasons of the events that tell what came of a stop."""

    SAVED = "SavedAndStopped"
    NOT_SAVED = "StoppedWithoutSave"
    NOTHING_TO_SAVE = "StoppedWithNothingToSave"
    UNKNOWN = "StopNotConfirmed"


_EVENTS = {
    Save.SAVED: StopEvent.SAVED,
    Save.NOT_SAVED: StopEvent.NOT_SAVED,
    Save.NOTHING_TO_SAVE: StopEvent.NOTHING_TO_SAVE,
    Save.UNKNOWN: StopEvent.UNKNOWN,
}


def stopping(  # noqa: PLR0911 (a table of cases reads best as one)
    observed: Observed,
    accepted: Accepted | None,
    running: Frozen | None,
    overdue: Notice | None,
    place: Placing | None = None,
    *,
    begun: bool = True,
) -> Notice | None:
    """For a job that has pods and has not ended: whether they are to stop now. `begun`: `starting.has_begun`."""
    if is_stopped(observed):
        return Notice(Reason.STOPPING, "nobody used the environment" if is_released(observed) else "spec.suspend is true")
    if overdue is not None:
        return Notice(Reason.DEADLINE_EXCEEDED, overdue.message)
    left_out = _pods_on_excluded(observed)
    if left_out is not None:
        return Notice(Reason.NODE_EXCLUDED, left_out)
    if accepted is not None and running is not None and _new_size(observed, accepted, running):
        return Notice(Reason.RESIZING, f"from {running.nodes} to {accepted.frozen.nodes} nodes")
    if not begun and accepted is not None and (why := _replaced(observed, accepted, running)) is not None:
        return Notice(Reason.START_REPLACED, why)
    if place is not None and place.lets_go:
        return Notice(Reason.NODES_RELEASED, place.message)
    if observed.replicas == 0 and any(is_terminating(pod) for pod in observed.pods):
        by = scaled_words(observed, "the job starts again after it")
        return Notice(Reason.STOPPING, by or "a stop was already under way; the job starts again after it")
    return None


def _new_size(observed: Observed, accepted: Accepted, running: Frozen) -> bool:
    """The job itself asks for another number of nodes, and could start with it. A cluster's new default waits for the next start."""
    stated = observed.job["spec"].get("nodes")
    return stated is not None and accepted.frozen.nodes != running.nodes and missing_service_account(observed, accepted) is None


def _pods_on_excluded(observed: Observed) -> str | None:
    """Return why the present pods have to go: one of them is on a node that has been excluded since."""
    findings = {node["name"]: node["message"] for node in observed.status.get("excludedNodes") or []}
    used = sorted({pod["spec"].get("nodeName") for pod in observed.pods} & set(findings))
    return f"the job starts again without node {used[0]}: {findings[used[0]]}" if used else None


def scaled_words(observed: Observed, what: str) -> str:
    """Return who else scaled the job's StatefulSet, what Lockstep does about it, and what scales a job; '' if nobody is known to have."""
    by = observed.scaled_by
    if not by:
        return ""
    when = f" at {by['time']}" if "time" in by else ""
    who = f"StatefulSet {observed.name} was scaled to {observed.replicas} by {by.get('manager') or 'somebody else'}{when}"
    where = f"{observed.name} -n {observed.namespace}"
    return f"{who}: {what}; `lockstep stop {where}` stops a job, `lockstep scale {where} N` resizes it"


def _replaced(observed: Observed, accepted: Accepted, running: Frozen | None) -> str | None:
    if running is not None:
        return replaced_by(observed, accepted, running)
    if observed.own_stateful_set is None or missing_service_account(observed, accepted) is not None:
        return None
    return "nothing proves what its pods were to run, and no rank ever ran, so the job starts again"


def last_word(observed: Observed, received: ReceivedReport | None) -> Report | None:
    """The report of the end of a stop counts although the pod that sent it is gone: nobody else can say it."""
    report = received.report if received is not None else None
    if report is None or observed.pod(0) is not None or report.stop is None or report.stop.attempt != report.attempt:
        return None
    return report if report.attempt >= int(observed.status.get("attempts") or 0) else None


def stop_status(observed: Observed, received: ReceivedReport | None, *, ended: bool, now: float) -> StopStatus | None:
    """Return status.stop: as reported; Unknown if the pods are gone and no report said it; else as it was before."""
    before = StopStatus.stored(observed.status.get("stop"))
    stop = received.report.stop if received is not None else None
    if stop is not None and (before is None or before.attempt <= stop.attempt):
        return taken_from(stop, StopStatus)
    attempt = int(observed.status.get("attempts") or 0)
    just_gone = observed.at_zero and int(observed.status.get("nodes") or 0) > 0
    ran = attempt > attempts_before(observed)
    if just_gone and not ended and ran and (before is None or before.attempt < attempt):
        return _unknown(observed, commit(observed, received), attempt, now)
    return before


def commit(observed: Observed, received: ReceivedReport | None) -> CheckpointReport | None:
    """The newest commit that node 0 has told of since this operator began, whether its pod is still there or not: status lags behind by up
    to 15 s.
    """
    if received is None or received.report.checkpoint is None or received.report.attempt < int(observed.status.get("attempts") or 0):
        return None
    before = observed.status_part("checkpoint").get("lastCommitTime")
    newest = received.report.checkpoint
    return newest if before is None or newest.time >= before else None


def _unknown(observed: Observed, newest_commit: CheckpointReport | None, attempt: int, now: float) -> StopStatus:
    step = newest_commit.step if newest_commit is not None else observed.status_part("checkpoint").get("lastCommittedStep")
    newest = "status knew of no checkpoint" if step is None else f"the newest checkpoint that was reported is step {step}"
    message = f"the pods are gone and node 0 did not say how the stop went; {newest}, `lockstep checkpoint` shows what is on the volume"
    return unchecked(StopStatus, time=timestamp(now), attempt=attempt, save=Save.UNKNOWN.value, message=message, step=step)


def stop_event(before: Object, after: Object) -> tuple[str, StopEvent, str] | None:
    """(type, reason, message) of the event about a stop that status didn't have yet."""
    stop = after.get("stop")
    if stop is None or stop == before.get("stop"):
        return None
    save = Save.read(stop["save"])
    kind = "Normal" if save in (Save.SAVED, Save.NOTHING_TO_SAVE) else "Warning"
    return kind, _EVENTS.get(save, StopEvent.UNKNOWN), stop.get("message", "")
