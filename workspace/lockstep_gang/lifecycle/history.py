"""What the volume of node 0 remembers of a job, and the gang that a new coordinator starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep_gang.contract.report import CheckpointReport, Failure, State
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.decide import backoff_seconds
from lockstep_gang.lifecycle.gang import Ending, Gang, Phase, new_gang

END_FORMAT = "lockstep-end/1"


@dataclass(frozen=True)
class AttemptRecord:
    """One start of all ranks. The number is used only once on this volume, whatever the job's uid."""

    attempt: int
    job_uid: str
    restarts: int
    started: str
    outcome: str | None = None
    """`Complete`, `Stopped` or `Failed`; null: it runs, or its coordinator ended without a word."""


@dataclass(frozen=True)
class EndRecord:
    """The end of a job: whoever reads it under the same uid never starts the job again."""

    job_uid: str
    state: State
    message: str
    attempt: int
    restarts: int
    ended: str
    failure: Failure | None = None
    checkpoint: CheckpointReport | None = None
    result: dict[str, str | None] | None = None
    format: str = END_FORMAT


def end_record(gang: Gang, run: Run, ended: str) -> EndRecord:
    """Raises AssertionError when the job has not ended."""
    assert gang.ending is not None  # noqa: S101 (an invariant of the caller)
    state, failure = gang.ending.state, gang.failure if gang.ending.state is State.FAILED else None
    return EndRecord(run.job.uid, state, gang.ending.message, gang.attempt, gang.restarts, ended, failure, gang.checkpoint, gang.result)


def resumed(run: Run, attempts: Sequence[AttemptRecord], end: EndRecord | None, now: float) -> Gang:
    """The gang as a new coordinator finds it. An attempt without an outcome was lost with its coordinator, and counts as a failure."""
    gang = replace(new_gang(run), known_attempt=max((record.attempt for record in attempts), default=0))
    own = [record for record in attempts if record.job_uid == run.job.uid]
    if own:
        gang = replace(gang, attempt=own[-1].attempt, restarts=own[-1].restarts, failures=own[-1].restarts)
    if end is not None and end.job_uid == run.job.uid:
        return _ended(gang, end)
    if not own or own[-1].outcome == "Stopped":
        return gang
    failures = own[-1].restarts + 1
    how = "failed" if own[-1].outcome else "ended without a word: node 0's agent was killed, ran out of memory or lost its node"
    failure = Failure(message=f"attempt {own[-1].attempt} {how}", node=0)
    return replace(gang, failures=failures, failure=failure, not_before=now + backoff_seconds(run, failures))


def _ended(gang: Gang, end: EndRecord) -> Gang:
    ending = Ending(end.state, end.message)
    there = replace(gang, phase=Phase.ENDED, ending=ending, attempt=end.attempt, restarts=end.restarts)
    return replace(there, failure=end.failure, checkpoint=end.checkpoint, result=end.result)
