"""A start that node 0 itself can't give up, because its pod has never run (pure). From then on its coordinator counts the time."""

from __future__ import annotations

from lockstep.api.timeouts import START_SECONDS
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Object, Observed, is_terminating
from lockstep.plan.pods import is_scheduled, placed_at, waits_for_a_claim, why_not_started
from lockstep.plan.reasons import Reason
from lockstep.plan.times import remaining, seconds_of
from lockstep.plan.unscheduled import why_unscheduled


def start_overdue(observed: Observed, now: float) -> Notice | None:
    """That spec.startTimeoutSeconds is over while all pods of the job hold nodes, or would but for a claim."""
    left = until_start_overdue(observed, now)
    if left is None or left > 0:
        return None
    seconds = observed.job["spec"].get("startTimeoutSeconds", START_SECONDS)
    pod = observed.pod(0)
    why = why_not_started(observed) if pod is not None and is_scheduled(pod) else why_unscheduled(observed)
    said = f": {why.message}" if why is not None else ""
    return Notice(Reason.START_TIMEOUT, f"node 0 did not start within the {seconds} s of startTimeoutSeconds{said}")


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
    return remaining(begun, float(observed.job["spec"].get("startTimeoutSeconds", START_SECONDS)), now)


def _has_ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def _has_run(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(status.get("restartCount") or "waiting" not in status.get("state", {"waiting": {}}) for status in statuses)
