"""Account of the gang's time (pure). Every moment goes to exactly one kind, so the kinds add up to the time that has passed.

The account is kept by whoever changes the gang: before a change, the time since the last one goes to what the gang was doing until now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep_gang.contract.messages import Step, StopMode
from lockstep_gang.contract.report import Cause, Goodput, Loss, Spent
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.failures import first_failure
from lockstep_gang.lifecycle.gang import Gang, Phase

SAVE_WAIT = "saveWaitSeconds"
"""The trainer's metric of how long a step waited for the save before."""
_ACTIVITIES = {"Evaluate": Spent.EVALUATE, "Save": Spent.SAVE, "Export": Spent.SAVE}
STOPPING_MILLISECONDS = 5000
_COSTS = frozenset({Spent.LOST, Spent.DOWN})
_USEFUL = (Spent.TRAIN, Spent.EVALUATE)


def accounted(gang: Gang, run: Run, now: float) -> Gang:
    """The gang with the time until `now` on its account. A clock that went back costs nothing and brings nothing."""
    book, moment = gang.goodput, int(now * 1000)
    if not book.began:
        return replace(gang, goodput=replace(book, began=moment, until=moment))
    kind = activity_of(gang, run)
    if kind is None:
        return gang
    gpus = run.gpus
    if kind is Spent.DOWN and gang.phase is Phase.STOPPING and gang.unproven:
        gang = replace(gang, goodput=_wasted(book, gang.unproven, _cause(gang, run), gpus), unproven={})
        book = gang.goodput
    if moment <= book.until:
        return gang
    if kind in _USEFUL:
        gang = replace(gang, unproven=_plus(gang.unproven, kind.value, moment - book.until))
    return replace(gang, goodput=_added(book, kind, moment, _cause(gang, run) if kind in _COSTS else None, gpus))


def accounted_now_and_then(gang: Gang, run: Run, now: float) -> Gang:
    """The gang as `accounted` returns it, less often. What a stopping gang's time is spent on doesn't change with what is heard, and why it
    stops takes a look at every rank: there it is enough now and then.
    """
    is_due = gang.phase is not Phase.STOPPING or now * 1000 >= gang.goodput.until + STOPPING_MILLISECONDS
    return accounted(gang, run, now) if is_due else gang


def with_absence(gang: Gang, run: Run, now: float) -> Gang:
    """The gang of a new coordinator: while there was none, the job was stopped as asked, or down."""
    book, moment = gang.goodput, int(now * 1000)
    if not book.began or gang.ending is not None or moment <= book.until:
        return gang
    if gang.failure is None:
        return replace(gang, goodput=_added(book, Spent.STOPPED if gang.attempt else Spent.QUEUED, moment, None, 0))
    return replace(gang, goodput=_added(book, Spent.DOWN, moment, _cause(gang, run), run.gpus))


def with_step(gang: Gang, report: Step) -> Gang:
    """The gang after rank 0 reported a step: how far the job has ever come, and how long the step waited for a save. A script that reports
    its first one had been loading until then.
    """
    book = gang.goodput
    unknown = book.spent.get(Spent.UNKNOWN.value, 0)
    if unknown:
        spent = {kind: value for kind, value in book.spent.items() if kind != Spent.UNKNOWN.value}
        book = replace(book, spent=_plus(spent, Spent.LOAD.value, unknown))
    gang = replace(gang, goodput=book, unproven={})
    if report.step <= book.furthest_step:
        return gang
    waited = min(_milliseconds(report.metrics.get(SAVE_WAIT)), book.spent.get(Spent.TRAIN.value, 0))
    spent = _plus(_plus(book.spent, Spent.TRAIN.value, -waited), Spent.SAVE.value, waited) if waited else book.spent
    return replace(gang, goodput=replace(book, furthest_step=report.step, spent=spent))


def proven_goodput(gang: Gang) -> Goodput:
    """The account as of the last step or evaluation, for the report: what is counted from reports must not be taken back by a failure."""
    book = gang.goodput
    if gang.phase not in (Phase.ACTIVE, Phase.STOPPING):
        return book
    open_ = {kind: min(milliseconds, book.spent.get(kind, 0)) for kind, milliseconds in gang.unproven.items()}
    spent = {kind: value - open_.get(kind, 0) for kind, value in book.spent.items()}
    return replace(book, spent=spent, until=book.until - sum(open_.values()))


def activity_of(gang: Gang, run: Run) -> Spent | None:
    """Kind of time that passes for the gang; None once it has ended."""
    if gang.phase is Phase.ENDED:
        return None
    if gang.phase is Phase.STOPPING:
        return Spent.SAVE if gang.stopping is StopMode.SAVE else Spent.DOWN
    if gang.phase is Phase.ACTIVE:
        return _active(gang, run)
    if gang.failure is not None:
        return Spent.DOWN
    checks = gang.preflight.stage is not None or gang.preflight.failures
    return Spent.PREFLIGHT if checks else Spent.QUEUED


def _active(gang: Gang, run: Run) -> Spent:
    last = gang.history[-1] if gang.history else None
    if last is not None and last.attempt < gang.attempt and last.downtime_seconds is None:  # after a failure, before the next first step
        return Spent.UNKNOWN if _runs_without_steps(gang, run) else Spent.DOWN
    activity = gang.trainer.activity if gang.trainer is not None else None
    step = (
        gang.trainer.step if gang.trainer is not None and gang.worked_at else None
    )  # that of an attempt's own, not the one it goes on from
    if activity in _ACTIVITIES:
        return _ACTIVITIES[activity]
    if step is not None:
        return Spent.LOST if step < gang.goodput.furthest_step else Spent.TRAIN
    return Spent.UNKNOWN if _runs_without_steps(gang, run) else Spent.LOAD


def _runs_without_steps(gang: Gang, run: Run) -> bool:
    """Return True for a script that has never reported a step, all of whose ranks run: nobody knows whether it trains."""
    return run.training is None and not gang.goodput.furthest_step and gang.ranks.counts.heard == len(gang.ranks)


def _wasted(book: Goodput, unproven: Mapping[str, int], cause: Cause, gpus: int) -> Goodput:
    """The book after a failure: what it has as useful since the last sign of work was a hang, or a step that nobody keeps."""
    wasted = {kind: min(milliseconds, book.spent.get(kind, 0)) for kind, milliseconds in unproven.items()}
    spent: Mapping[str, int] = book.spent
    for kind, milliseconds in wasted.items():
        spent = _plus(spent, kind, -milliseconds)
    total = sum(wasted.values())
    return replace(_charged(book, cause, total, gpus), spent=_plus(spent, Spent.DOWN.value, total))


def _charged(book: Goodput, cause: Cause, milliseconds: int, gpus: int) -> Goodput:
    before = book.causes.get(cause.value, Loss())
    loss = Loss(before.milliseconds + milliseconds, before.gpu_milliseconds + milliseconds * gpus)
    return replace(book, causes={**book.causes, cause.value: loss})


def _cause(gang: Gang, run: Run) -> Cause:
    """Cause for which the gang is down, or does steps again."""
    if gang.phase is Phase.STOPPING:
        return first_failure(gang, run).cause or Cause.INTERNAL
    last = gang.history[-1] if gang.history else None
    stopped_since = gang.stopped is not None and (last is None or last.attempt < gang.stopped.attempt)
    if gang.failure is None and (last is None or stopped_since):
        return Cause.STOPPED
    failure = gang.failure or (last.failure if last is not None else None)
    return (failure.cause if failure is not None else None) or Cause.INTERNAL


def _added(book: Goodput, kind: Spent, moment: int, cause: Cause | None, gpus: int) -> Goodput:
    """The book with all time up to `moment` on `kind`."""
    passed = moment - book.until
    book = replace(book, until=moment, spent=_plus(book.spent, kind.value, passed))
    return book if cause is None else _charged(book, cause, passed, gpus)


def _plus(spent: Mapping[str, int], kind: str, milliseconds: int) -> dict[str, int]:
    return {**spent, kind: spent.get(kind, 0) + milliseconds}


def _milliseconds(text: str | None) -> int:
    """Milliseconds of a metric in seconds; 0 when it is not there, or no number."""
    try:
        return max(0, int(float(text or 0) * 1000))
    except (ValueError, OverflowError):
        return 0
