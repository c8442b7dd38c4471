"""Cost of a failure: to the restart budget, and in work that is lost (pure)."""

from __future__ import annotations

from dataclasses import replace

from lockstep_gang.contract.messages import Hello
from lockstep_gang.contract.report import HISTORY, Cause, Failure, Restart
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import seconds_of, stamp
from lockstep_gang.lifecycle.gang import OWN_FAULTS, Budget, Gang
from lockstep_gang.lifecycle.losses import explained_by_fact, explaining_fact

BACKOFF_MAX_SECONDS = 300
TOLD_TO_END = (
    "node {node} received SIGTERM, as when its pod is deleted, its machine shut down or its service stopped; what sent it has not been told"
)
REPEATED = frozenset({Cause.USER_CODE, Cause.SETUP})
"""Causes that, at the same step with the same words, would only come again."""
COMPARED_CHARACTERS = 800
"""Length of the part of an error's words that is compared: the message that holds them is cut at its end, elsewhere for another rank."""


def with_failure_charged(gang: Gang, failure: Failure, now: float) -> Gang:
    """The gang after its attempt failed: history longer by one, and budget spent unless the cluster took a node away."""
    fact = explaining_fact(gang, failure, now)
    failure = failure if fact is None else explained_by_fact(failure, fact)
    budget, committed = gang.budget, gang.checkpoint.step if gang.checkpoint is not None else 0
    if committed > budget.committed_step:
        budget = replace(budget, counted=0)
    counts = fact is None or fact.type in OWN_FAULTS
    budget = Budget(budget.failures + 1, budget.counted + counts, max(committed, budget.committed_step))
    entry = _entry(gang, failure, now)
    if fact is not None:
        entry = replace(entry, counts=counts, explained_by=fact.pod_uid)
    return replace(gang, budget=budget, failure=failure, history=(*gang.history, entry)[-HISTORY:])


def _entry(gang: Gang, failure: Failure, now: float) -> Restart:
    committed = gang.checkpoint.step if gang.checkpoint is not None else 0
    reached = gang.trainer.step if gang.trainer is not None else None
    lost_steps = max(0, max(failure.step or 0, reached or 0) - committed)
    return Restart(gang.attempt, stamp(now), replace(failure, last_lines=()), lost_steps, down_since=_down_since(gang, failure, now))


def _down_since(gang: Gang, failure: Failure, now: float) -> str:
    """Time of the attempt's last step; if it came to none, since when the job has been down already, else when the lost node was last
    heard.
    """
    if gang.worked_at:
        return stamp(min(gang.worked_at, now))
    last = gang.history[-1] if gang.history else None
    if last is not None and last.downtime_seconds is None and gang.goodput.furthest_step and last.down_since is not None:
        return last.down_since
    return stamp(min([now, *(silence.since for silence in gang.silences if silence.node == failure.node)]))


def with_step_reached(gang: Gang, hello: Hello, now: float) -> Gang:
    """The gang of a new coordinator after an agent has told how far its ranks had come: the one before it died with what it knew."""
    last = gang.history[-1] if gang.history else None
    furthest_rank = max((state for state in hello.ranks if state.step is not None), key=lambda state: state.step or 0, default=None)
    step = furthest_rank.step or 0 if furthest_rank is not None else 0
    if last is None or not last.attempt == gang.attempt == hello.known_attempt or step <= (last.failure.step or 0):
        return gang
    if furthest_rank is not None and furthest_rank.step_age_seconds is not None:
        last = replace(last, down_since=stamp(now - furthest_rank.step_age_seconds))
    failure = replace(last.failure, step=step)
    entry = replace(last, failure=failure, lost_steps=max(0, step - (gang.checkpoint.step if gang.checkpoint is not None else 0)))
    furthest = max(step, gang.goodput.furthest_step)
    return replace(
        gang,
        history=(*gang.history[:-1], entry),
        failure=replace(gang.failure, step=step) if gang.failure is not None else None,
        goodput=replace(gang.goodput, furthest_step=furthest),
    )


def with_resumed_from(gang: Gang, step: int, path: str | None) -> Gang:
    """The gang after rank 0 has told the commit that its attempt goes on from: where newer ones are damaged, the way to it is lost, too."""
    if gang.checkpoint is None or step >= gang.checkpoint.step:
        return gang
    last, more = gang.history[-1] if gang.history else None, gang.checkpoint.step - step
    gang = replace(gang, checkpoint=replace(gang.checkpoint, step=step, path=path or ""))
    if last is None or last.attempt >= gang.attempt or last.downtime_seconds is not None:
        return gang
    return replace(gang, history=(*gang.history[:-1], replace(last, lost_steps=last.lost_steps + more)))


def nodes_that_left(gang: Gang, now: float) -> tuple[Restart, ...]:
    """Entries that the history gets if the cluster made these nodes leave, which nobody has said yet."""
    step = gang.trainer.step if gang.trainer is not None else None
    nodes = [index for index, node in enumerate(gang.nodes) if node.leaving]
    failures = [Failure(TOLD_TO_END.format(node=index), node=index, cause=Cause.NODE_LOST, step=step) for index in nodes]
    return tuple(replace(_entry(gang, failure, now), counts=False) for failure in failures)


def is_repeated(gang: Gang, failure: Failure) -> bool:
    """Return True for the same error of the user's code twice in a row at the same step, on whichever rank: another attempt would end the
    same way.
    """
    before = gang.history[-1].failure if gang.history else None
    if before is None or failure.cause not in REPEATED or failure.exception is None:
        return False
    committed = gang.checkpoint is not None and gang.checkpoint.step > gang.budget.committed_step
    tells_steps = failure.rank is None or gang.ranks[failure.rank].progress.step is not None
    # Ranks wait for each other in every step: rank 0's, which stands in for a rank that tells none, is at most one away from it.
    apart = abs((before.step or 0) - (failure.step or 0))
    return apart <= (0 if tells_steps or committed else 1) and _signature(before) == _signature(failure)


def _signature(failure: Failure) -> tuple[object, ...]:
    """The error's own words, without whose they are and how that rank ended: where all ranks raise it, who is heard first is chance."""
    words = failure.message.partition(f": {failure.exception}: ")[2]
    return failure.cause, failure.exception, words[:COMPARED_CHARACTERS]


def is_spent(budget: Budget, run: Run) -> bool:
    return budget.counted > run.restart.max_restarts


def backoff_seconds(run: Run, failures: int) -> float:
    """Wait after so many failures since the last new commit: none after the first, then doubled each time up to a bound, which never makes
    it less than what was asked for.
    """
    if failures <= 1:
        return 0.0
    doubled: int = run.restart.backoff_seconds * 2 ** min(failures - 2, 16)
    return float(min(doubled, max(BACKOFF_MAX_SECONDS, run.restart.backoff_seconds)))


def may_start_at(gang: Gang, run: Run, failed_at: float) -> float:
    """Earliest time of the attempt after a failure that is charged already.

    Commits end the wait, and a job may fail after each of them: unless its failure is the job's first, an attempt is followed by another
    one `backoffSeconds` after its own beginning at the earliest. That may be of another machine's clock, so it adds no more than that.
    """
    is_first = len(gang.history) <= 1
    spaced = 0.0 if is_first else min(gang.began_at, failed_at) + run.restart.backoff_seconds
    return max(failed_at + backoff_seconds(run, gang.budget.counted), spaced)


def with_downtime_ended(gang: Gang, now: float) -> Gang:
    """End the downtime of the last failure at the first step after a restart. It began with the last step before."""
    if not gang.history or gang.history[-1].downtime_seconds is not None or gang.history[-1].attempt >= gang.attempt:
        return gang
    last = gang.history[-1]
    down = max(0, round(now - (seconds_of(last.down_since or last.failed) or now)))
    return replace(gang, history=(*gang.history[:-1], replace(last, downtime_seconds=down)))
