"""A start that node 0 itself can't give up, because its pod has never run (pure). From then on its coordinator counts the time."""

from __future__ import annotations

from lockstep.api.timeouts import START_SECONDS
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Object, Observed, is_terminating
from lockstep.plan.pods import is_scheduled, why_not_started
from lockstep.plan.reasons import Reason
from lockstep.plan.times import seconds_of
from lockstep.plan.unscheduled import why_unscheduled


def start_overdue(observed: Observed, now: float) -> Notice | None:
    """That spec.startTimeoutSeconds is over while pods of the job hold nodes. A job of which no pod has a node holds nothing, and may wait."""
    left = until_start_overdue(observed, now)
    if left is None or left > 0:
        return None
    seconds = observed.job["spec"].get("startTimeoutSeconds", START_SECONDS)
    pod = observed.pod(0)
    why = why_not_started(observed) if pod is not None and is_scheduled(pod) else why_unscheduled(observed)
    said = f": {why.message}" if why is not None else ""
    return Notice(Reason.START_TIMEOUT, f"node 0 did not start within the {seconds} s of startTimeoutSeconds{said}")


def until_start_overdue(observed: Observed, now: float) -> float | None:
    """Seconds, at most 0 when it is; None: no clock runs."""
    pod = observed.pod(0)
    if pod is None or is_terminating(pod) or _has_run(pod) or not any(is_scheduled(other) for other in observed.pods):
        return None
    created = pod["metadata"].get("creationTimestamp")
    if created is None:
        return None
    return seconds_of(created) + float(observed.job["spec"].get("startTimeoutSeconds", START_SECONDS)) - now


def _has_run(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(status.get("restartCount") or "waiting" not in status.get("state", {"waiting": {}}) for status in statuses)
