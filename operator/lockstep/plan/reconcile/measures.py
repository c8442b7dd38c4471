"""Numbers of a job: status.goodput, the coordinator's account with the time before it that only the cluster knows, and what metrics show.
Pure.

Counters are counted from one stored status to the next, by whoever leads: the first one that an operator sees is where it begins, all
growth after it is counted once. So nothing is lost or counted twice when another replica, or another version, takes over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lockstep.api.objects import Object, condition, is_true
from lockstep.api.status import GoodputStatus, LossStatus
from lockstep.api.statuspart import unchecked
from lockstep.plan.observed import Observed
from lockstep.plan.reasons import Reason
from lockstep.plan.times import seconds_of
from lockstep_gang.contract.report import UNREPORTED, Cause, Failure, Goodput, Report, Spent

STATES = ("Waiting", "Starting", "Running", "Restarting", "Silent", "Stopping", "Suspended", "Complete", "Failed")
"""States of a job; it is in exactly one."""
OUTCOMES = ("Complete", "Failed")
GOODPUT, LOST, LOST_GPU, RESTARTS, FINISHED = "goodput", "lost", "lostGpu", "restarts", "finished"
_STATE_OF_REASON = {
    "Running": "Running", "Restarting": "Restarting", "Starting": "Starting", "NoReport": "Silent", "NodeNotHeard": "Running",
    "Stopping": "Stopping", "Resizing": "Stopping", "StartReplaced": "Stopping", "DeadlineExceeded": "Stopping",
}  # fmt: skip


@dataclass(frozen=True)
class Counted:
    """State of a job's counters: (counter, label) → total, its newest restart, and its end."""

    totals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    attempt: int = 0
    end: str = ""


@dataclass(frozen=True)
class Growth:
    """Growth of a counter under its own label (a kind, a cause or an outcome)."""

    counter: str
    label: str
    amount: int


def with_failures_known(status: Object, report: Report) -> Report:
    """Return the report with the failures that status had of attempts whose coordinator could write none down, and was lost."""
    known = {UNREPORTED.format(entry["attempt"]): entry for entry in status.get("restartHistory") or []}

    def of(failure: Failure) -> Failure:
        entry = known.get(failure.message.partition(":")[0])
        if entry is None or entry["cause"] not in CAUSES or entry["message"] == failure.message:
            return failure
        return Failure(entry["message"], entry.get("rank"), entry.get("node"), cause=Cause(entry["cause"]), step=failure.step)

    failure = None if report.failure is None else of(report.failure)
    history = tuple(replace(entry, failure=of(entry.failure)) for entry in report.history)
    return replace(report, failure=failure, message=of(Failure(report.message)).message, history=history)


def counted(status: Object) -> Counted:
    """Everything that this status holds."""
    attempts = [entry["attempt"] for entry in status.get("restartHistory", [])]
    return Counted(dict(_totals(status)), max(attempts, default=0), _end(status))


def growth(previous: Counted, status: Object) -> tuple[Counted, tuple[Growth, ...]]:
    """Return the counters after `status`, and their growth. A total that is smaller now brings nothing."""
    new = counted(status)
    grown = [Growth(*key, total - previous.totals.get(key, 0)) for key, total in new.totals.items() if total > previous.totals.get(key, 0)]
    new_restarts = [entry for entry in status.get("restartHistory", []) if entry["attempt"] > previous.attempt]
    grown += [Growth(RESTARTS, entry["cause"], 1) for entry in new_restarts if entry["cause"] in CAUSES]
    if new.end and new.end != previous.end:
        grown.append(Growth(FINISHED, new.end.partition("/")[0], 1))
    totals = {key: max(previous.totals.get(key, 0), new.totals.get(key, 0)) for key in {**previous.totals, **new.totals}}
    return Counted(totals, max(previous.attempt, new.attempt), new.end or previous.end), tuple(grown)


def _totals(status: Object) -> Iterator[tuple[tuple[str, str], int]]:
    goodput = status.get("goodput") or {}
    for kind in KINDS:
        if kind != Spent.UNKNOWN.value or _end(status):  # until then it may turn out to have been another kind
            yield (GOODPUT, kind), goodput.get(f"{kind}Seconds", 0)
    for loss in (loss for loss in goodput.get("losses", []) if loss["cause"] in CAUSES):
        yield (LOST, loss["cause"]), loss["seconds"]
        yield (LOST_GPU, loss["cause"]), loss["gpuSeconds"]


def _end(status: Object) -> str:
    """The outcome, and of which retry; empty while it goes on."""
    outcome = next((name for name in OUTCOMES if is_true(status, name)), "")
    return f"{outcome}/{status.get('retry') or 0}" if outcome else ""


def state(status: Object) -> str:
    """One of `STATES`."""
    for name in (*OUTCOMES, "Suspended"):
        if is_true(status, name):
            return name
    reason = condition(status, "Progressing").get("reason", "")
    return _STATE_OF_REASON.get(reason, "Waiting")


def profile_of(job: Object) -> str:
    """The cluster in use; empty: none yet. Not the one that is asked for: there are as many of those as people make up."""
    used = (job.get("status") or {}).get("cluster") or {}
    return str(used.get("name") or "")


def gauges(status: Object, now: float, report_age: float | None) -> dict[str, float]:
    """Gauges of one job that has not finished, by the metric's name without its prefix. Unknown ones are left out."""
    is_heard = _is_heard(status)
    trainer, checkpoint, preflight = (status.get(name) or {} for name in ("trainer", "checkpoint", "preflight"))
    values: dict[str, float | None] = {
        "running": float(state(status) == "Running"),
        "restarts": status.get("restarts", 0),
        "step": trainer.get("step"),
        "total_steps": trainer.get("totalSteps"),
        "estimated_remaining_seconds": trainer.get("estimatedRemainingSeconds"),
        "loss": _metric(trainer, "loss"),
        "tokens_per_second": _metric(trainer, "tokensPerSecond"),
        "mfu": _metric(trainer, "mfu"),
        "peak_memory_bytes": _metric(trainer, "peakMemoryBytes"),
        "checkpoint_age_seconds": None if not checkpoint else max(0.0, now - seconds_of(checkpoint["lastCommitTime"])),
        "checkpoint_step": checkpoint.get("lastCommittedStep"),
        "checkpoint_commit_seconds": _metric(trainer, "saveSeconds"),
        "goodput_percentage": (status.get("goodput") or {}).get("percentage"),
        "fabric_verified": _truth(status, "FabricVerified") if is_heard else None,
        "straggling": _truth(status, "Straggling"),
        "record_unwritten": float(condition(status, "Progressing").get("reason") == Reason.RECORD_UNWRITTEN),
        "preflight_ok": None if "ok" not in preflight else float(preflight["ok"]),
        "preflight_clocks_off": None if "ok" not in preflight else sum(f.get("check") == "clock" for f in preflight.get("findings", [])),
        "report_age_seconds": _report_age(status, now, report_age) if is_heard else None,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def _report_age(status: Object, now: float, report_age: float | None) -> float | None:
    """A silence that an earlier leader noticed goes on: one that has just begun to listen must not make an alert go away."""
    noticed = condition(status, "Progressing").get("lastTransitionTime") if state(status) == "Silent" else None
    return report_age if noticed is None else max(now - seconds_of(noticed), report_age or 0.0)


def _is_heard(status: Object) -> bool:
    """Return True if a node 0 is there to report. Nobody needs a warning about an earlier one."""
    if state(status) == "Silent":
        return True
    awaited = condition(status, "RanksReady").get("reason") in (Reason.STARTING, Reason.WAITING_FOR_REPORT)
    return state(status) not in ("Waiting", "Stopping", "Suspended") and not awaited


def _truth(status: Object, kind: str) -> float | None:
    """1 or 0; None while it is unknown."""
    return {"True": 1.0, "False": 0.0}.get(condition(status, kind).get("status", "Unknown"))


def _metric(trainer: Object, name: str) -> float | None:
    text = next((metric["value"] for metric in trainer.get("metrics", []) if metric["name"] == name), None)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


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

    seconds = {kind: book.spent.get(kind, 0) // 1000 for kind in KINDS}
    seconds[Spent.QUEUED.value] += _queued_before(observed, book)
    losses = [
        unchecked(LossStatus, cause=cause, seconds=loss.milliseconds // 1000, gpu_seconds=loss.gpu_milliseconds // 1000)
        for cause, loss in sorted(book.causes.items())
        if cause in CAUSES
    ]
    status = unchecked(GoodputStatus, percentage=percentage_of(book.spent, book.furthest_step), losses=losses or None)
    return status.model_copy(update={f"{kind}_seconds": value for kind, value in seconds.items()})


def percentage_of(spent: Mapping[str, int], furthest_step: int) -> int | None:
    """Share of training and evaluation in the time that pods were there, in percent; `spent`: by kind, in any one unit. None if no step was
    ever reported.
    """
    if not furthest_step:
        return None
    with_pods = sum(spent.values()) - sum(spent.get(kind.value, 0) for kind in _NO_PODS)
    useful = sum(spent.get(kind.value, 0) for kind in _USEFUL)
    return min(100, 100 * useful // with_pods) if with_pods > 0 else 0


def _queued_before(observed: Observed, book: Goodput) -> int:
    """Seconds from the first pods, or with a queue from the job's creation, to the first coordinator."""
    queued = observed.job["spec"].get("queueName") is not None
    since = observed.job["metadata"].get("creationTimestamp") if queued else observed.status.get("startTime")
    return 0 if since is None else max(0, book.began // 1000 - int(seconds_of(since)))


def is_stale(before: Object, after: Object) -> bool:
    """Return True if the account has grown so much that it is written though nothing else changed."""
    return _total(after) - _total(before) >= ALONE_SECONDS


def _total(status: Object) -> int:
    return sum(value for key, value in (status.get("goodput") or {}).items() if key.endswith("Seconds"))
