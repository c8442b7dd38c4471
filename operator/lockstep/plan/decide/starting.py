"""A start from zero pods until its first attempt begins (pure): when it is given up, and when a corrected spec takes its place.

Node 0 itself can't give up a start while its pod has never run. From then on its coordinator counts the time.
"""

from __future__ import annotations

import re

from lockstep.api.names import ANNOTATION_ATTEMPTS_BEFORE
from lockstep.api.objects import Object, is_running
from lockstep.plan.decide.accept import Accepted, missing_service_account
from lockstep.plan.decide.interactive import is_interactive
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, ReceivedReport, current_report, is_terminating
from lockstep.plan.reasons import Reason
from lockstep.plan.render.objects import Frozen, differs_by_user
from lockstep.plan.times import remaining, seconds_of
from lockstep.plan.waiting.containers import is_scheduled, placed_at, waits_for_a_claim, why_not_started
from lockstep.plan.waiting.unscheduled import why_unscheduled
from lockstep_gang.contract import State
from lockstep_spec.timeouts import Timeouts

FRESH_SECONDS = 30.0
"""A report that is older doesn't say that no rank has been started since."""


def has_begun(observed: Observed, received: ReceivedReport | None, now: float) -> bool:
    """Whether an attempt of the newest start has begun, or may have begun unheard. As long as none has, a start can be replaced at no loss."""
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
    heard = current_report(observed, received)
    is_fresh = heard is not None and now - heard.received <= FRESH_SECONDS
    return heard is None or not is_fresh or heard.report.state is not State.WAITING


def attempts_before(observed: Observed) -> int:
    """How many attempts there had been when the newest start from zero pods began."""
    seen = observed.stateful_set or {"metadata": {}}
    stated = str((seen["metadata"].get("annotations") or {}).get(ANNOTATION_ATTEMPTS_BEFORE, ""))
    return int(stated) if re.fullmatch(r"\d{1,9}", stated) else 0


def start_mark(observed: Observed) -> dict[str, str]:
    """The StatefulSet's annotation for `attempts_before`: goes up with the pods in one write, so that no start is without it."""
    attempts = int(observed.status.get("attempts") or 0) if observed.at_zero else attempts_before(observed)
    return {ANNOTATION_ATTEMPTS_BEFORE: str(attempts)} if attempts else {}


def replaced_by(observed: Observed, accepted: Accepted, running: Frozen) -> str | None:
    """Why a start that has not begun is to make way for what the job would start with now; None: it stays.

    What only the operator adds (its image, its certificate) counts where pods can't start: a queue of a thousand jobs survives an upgrade.
    """
    if accepted.frozen.hash == running.hash or missing_service_account(observed, accepted) is not None:
        return None
    if differs_by_user(running, accepted.frozen):
        return "spec or cluster were changed before any rank ran, so the job starts anew with them"
    return "the operator was changed while the pods could not start, so they start anew" if why_not_started(observed) is not None else None


def start_overdue(observed: Observed, now: float) -> Notice | None:
    """That spec.startTimeoutSeconds is over while all pods of the job hold nodes, or would but for a claim."""
    left = until_start_overdue(observed, now)
    if left is None or left > 0:
        return None
    seconds = observed.job["spec"].get("startTimeoutSeconds", Timeouts.start_seconds)
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
    return remaining(begun, float(observed.job["spec"].get("startTimeoutSeconds", Timeouts.start_seconds)), now)


def _has_ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def _has_run(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(status.get("restartCount") or "waiting" not in status.get("state", {"waiting": {}}) for status in statuses)
