"""status.goodput: the coordinator's account in seconds, and the time before it that only the cluster knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.api.objects import Object
from lockstep.api.status import GoodputStatus, LossStatus
from lockstep.api.statuspart import unchecked
from lockstep.plan.observed import Observed
from lockstep.plan.times import seconds_of
from lockstep_gang.contract.report import Cause, Goodput, Report, Spent

ALONE_SECONDS = 300
"""The account alone is written this often: a thousand scripts that tell no steps must not keep the API server busy with seconds."""
KINDS = tuple(kind.value for kind in Spent)
CAUSES = tuple(cause.value for cause in Cause)
"""Others are a pod's invention, or a newer agent's: metrics have a series for each."""
_USEFUL = (Spent.TRAIN, Spent.EVALUATE)
_NO_PODS = (Spent.QUEUED, Spent.STOPPED)


def goodput_status(observed: Observed, report: Report) -> GoodputStatus | None:
    """Return status.goodput; None if this gang keeps no account, as those of older agents."""
    book = report.goodput
    if book is None or not book.began:
        return None

    def seconds(kind: Spent) -> int:
        return book.spent.get(kind.value, 0) // 1000

    losses = [
        unchecked(LossStatus, cause=cause, seconds=loss.milliseconds // 1000, gpu_seconds=loss.gpu_milliseconds // 1000)
        for cause, loss in sorted(book.causes.items())
        if cause in CAUSES
    ]
    return unchecked(
        GoodputStatus,
        percentage=percentage_of(book.spent, book.furthest_step),
        queued_seconds=seconds(Spent.QUEUED) + _queued_before(observed, book),
        preflight_seconds=seconds(Spent.PREFLIGHT),
        load_seconds=seconds(Spent.LOAD),
        train_seconds=seconds(Spent.TRAIN),
        unknown_seconds=seconds(Spent.UNKNOWN),
        evaluate_seconds=seconds(Spent.EVALUATE),
        save_seconds=seconds(Spent.SAVE),
        lost_seconds=seconds(Spent.LOST),
        down_seconds=seconds(Spent.DOWN),
        stopped_seconds=seconds(Spent.STOPPED),
        losses=losses or None,
    )


def percentage_of(spent: Mapping[str, int], furthest_step: int) -> int | None:
    """Share of training and evaluation in the time that pods were there, in percent; `spent`: by kind, in any one unit. None if no step was ever reported."""
    if not furthest_step:
        return None
    held = sum(spent.values()) - sum(spent.get(kind.value, 0) for kind in _NO_PODS)
    useful = sum(spent.get(kind.value, 0) for kind in _USEFUL)
    return min(100, 100 * useful // held) if held > 0 else 0


def _queued_before(observed: Observed, book: Goodput) -> int:
    """Seconds from the first pods, or with a queue from the job's creation, to the first coordinator."""
    queued = observed.job["spec"].get("queueName") is not None
    since = observed.job["metadata"].get("creationTimestamp") if queued else observed.status.get("startTime")
    return 0 if since is None else max(0, book.began // 1000 - int(seconds_of(since)))


def is_stale(before: Object, wanted: Object) -> bool:
    """Return True if the account has grown so much that it is written though nothing else changed."""
    return _total(wanted) - _total(before) >= ALONE_SECONDS


def _total(status: Object) -> int:
    return sum(value for key, value in (status.get("goodput") or {}).items() if key.endswith("Seconds"))
