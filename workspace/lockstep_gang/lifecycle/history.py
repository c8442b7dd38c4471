"""Records of a job on node 0's volume, and the gang that a new coordinator starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lockstep_gang.contract.messages import Finish
from lockstep_gang.contract.preflight import ProgramFact
from lockstep_gang.contract.report import HISTORY, UNREPORTED, Cause, CheckpointReport, Failure, Restart, State
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import seconds_of, stamp
from lockstep_gang.lifecycle.budget import TOLD_TO_END, may_start_at, with_failure_charged
from lockstep_gang.lifecycle.gang import Budget, Gang, Phase, new_gang
from lockstep_gang.lifecycle.preflight.rounds import Preflight

END_FORMAT = "lockstep-end/1"
ATTEMPTS_MAX = 200
"""Attempts remembered on the volume, of earlier jobs of the name and of every run of a dev environment too."""


@dataclass(frozen=True)
class AttemptRecord:
    """One start of all ranks. The number is used only once on this volume, whatever the job's uid."""

    attempt: int
    job_uid: str
    restarts: int
    started: str
    outcome: str | None = None
    """`Complete`, `Stopped` or `Failed`; null: it runs, or its coordinator ended without a word."""
    restart: Restart | None = None
    """Entry of the history for a failed attempt: what happened, and what it cost."""
    budget: Budget = field(default_factory=Budget)
    """Budget after it; while it runs, before it."""
    checkpoint: CheckpointReport | None = None
    """The newest commit when it ended."""
    retry: int = 0
    """restart.retry of the run that started it."""
    boots: tuple[str, ...] = ()
    """Starts of the nodes' machines when it began (`Hello.boot_id`), of the newest attempt alone. Empty where an operator explains losses.
    """
    programs: dict[str, ProgramFact] = field(default_factory=dict)
    """The program that it runs on each node, by its index, of the newest attempt alone."""


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
    retry: int = 0
    """restart.retry of the run that ended: a failure counts until a higher one."""
    format: str = END_FORMAT


def begun_records(attempts: Sequence[AttemptRecord], gang: Gang, run: Run, started: str) -> list[AttemptRecord]:
    """The records with the attempt that begins. What was charged for one that ended without a word becomes durable here."""
    begun = AttemptRecord(
        gang.attempt, run.job.uid, gang.restarts, started, budget=gang.budget, checkpoint=gang.checkpoint, retry=run.restart.retry
    )
    boots = () if run.report is not None else tuple(node.boot_id for node in gang.nodes)
    begun = replace(begun, boots=boots, programs=dict(gang.preflight.programs))
    return retained_records([*(replace(record, boots=(), programs={}) for record in _with_costs(attempts, gang)), begun])


def retained_records(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """The newest records. The last one has the highest number and the budget; of its job the newest commit and the newest failures stay,
    however many attempts came after them.
    """
    last = attempts[-1:]
    own = [index for index, record in enumerate(attempts) if last and record.job_uid == last[0].job_uid]
    committed = [index for index in own if attempts[index].checkpoint is not None]
    failed = [index for index in own if attempts[index].restart is not None]
    needed = {*committed[-1:], *failed[-HISTORY:]}
    first = len(attempts) - ATTEMPTS_MAX
    return [record for index, record in enumerate(attempts) if index >= first or index in needed]


def closed_records(attempts: Sequence[AttemptRecord], outcome: str, gang: Gang) -> list[AttemptRecord]:
    """The records after the newest attempt has ended."""
    last = replace(attempts[-1], outcome=outcome, budget=gang.budget, checkpoint=gang.checkpoint)
    return _with_costs([*attempts[:-1], last], gang)


def corrected_records(attempts: Sequence[AttemptRecord], gang: Gang) -> list[AttemptRecord]:
    """The records after a failure turned out to be the cluster's doing."""
    records = _with_costs(attempts, gang)
    return [*records[:-1], replace(records[-1], budget=gang.budget)] if records else []


def _with_costs(attempts: Sequence[AttemptRecord], gang: Gang) -> list[AttemptRecord]:
    """The records with each failure's cost as it is known by now."""
    costs = {restart.attempt: restart for restart in gang.history}
    return [replace(record, restart=costs.get(record.attempt, record.restart)) for record in attempts]


def end_record(gang: Gang, run: Run, ended: str) -> EndRecord:
    """Record of the end. Raises AssertionError when the job has not ended."""
    assert gang.ending is not None  # noqa: S101 (an invariant of the caller)
    state, failure = gang.ending.state, gang.failure if gang.ending.state is State.FAILED else None
    return EndRecord(
        run.job.uid,
        state,
        gang.ending.message,
        gang.attempt,
        gang.restarts,
        ended,
        failure,
        gang.checkpoint,
        gang.result,
        run.restart.retry,
    )


def resume_gang(
    run: Run,
    attempts: Sequence[AttemptRecord],
    end: EndRecord | None,
    now: float,
    commit: CheckpointReport | None = None,
    alive_at: float = 0.0,
) -> Gang:
    """The gang as a new coordinator finds it. An attempt without an outcome was lost with its coordinator, and counts as a failure.

    `commit`: the newest of this job, as far as it was written down beside the attempts. `alive_at`: when the coordinator before this one
    last wrote anything down, Unix time; 0: nobody knows.
    """
    gang = new_gang(run)
    gang = replace(gang, known_attempt=max([gang.known_attempt, *(record.attempt for record in attempts)]))
    own = [record for record in attempts if record.job_uid == run.job.uid]
    if own:
        gang = replace(
            gang,
            attempt=own[-1].attempt,
            began_at=(seconds_of(own[-1].started) or 0.0),
            restarts=own[-1].restarts,
            budget=own[-1].budget,
            checkpoint=_newest_commit(own, commit),
            history=tuple(record.restart for record in own if record.restart is not None)[-HISTORY:],
            preflight=Preflight(programs=own[-1].programs),
        )
        if len(own[-1].boots) == run.nodes:
            gang = gang.with_nodes({index: replace(gang.nodes[index], boot_id=boot) for index, boot in enumerate(own[-1].boots)})
    if run.interactive is not None:  # an environment has no end, and nobody waits for the runs of an earlier coordinator
        return replace(gang, budget=Budget(), restarts=0, history=())
    if end is not None and end.job_uid == run.job.uid and not _is_retried(end, run):
        return _ended(gang, end)
    if own and own[-1].retry < run.restart.retry:
        return replace(gang, budget=replace(gang.budget, counted=0))
    if not own or own[-1].outcome not in (None, "Complete", "Failed"):  # "Stopped", or what another version has written: no failure
        return replace(gang, facts=replace(gang.facts, left=tuple(_node_0_left(last, now, alive_at) for last in own[-1:])))
    if own[-1].outcome is not None and own[-1].restart is not None:  # its end was recorded in full
        return replace(gang, failure=own[-1].restart.failure, not_before=may_start_at(gang, run, now))
    text = f"{UNREPORTED.format(own[-1].attempt)}: node 0's agent was killed, ran out of memory or lost its node"
    gang = with_failure_charged(replace(gang, worked_at=alive_at), Failure(message=text, node=0, cause=Cause.NODE_LOST), now)
    return replace(gang, not_before=may_start_at(gang, run, now))


def _node_0_left(last: AttemptRecord, now: float, alive_at: float) -> Restart:
    """Entry for an attempt that was stopped with its coordinator, by a suspension for example, should the cluster say that it was something
    else.
    """
    failure = Failure(message=TOLD_TO_END.format(node=0), node=0, cause=Cause.NODE_LOST)
    return Restart(last.attempt, stamp(alive_at or now), failure, lost_steps=0, counts=False)


def _newest_commit(own: Sequence[AttemptRecord], commit: CheckpointReport | None) -> CheckpointReport | None:
    """The commit that was heard last: an attempt that goes back to an older one commits smaller steps again."""
    recorded = next((record.checkpoint for record in reversed(own) if record.checkpoint is not None), None)
    commits = [each for each in (commit, recorded) if each is not None]
    return max(commits, key=lambda each: each.time, default=None)


def _is_retried(end: EndRecord, run: Run) -> bool:
    """Return True if a failure is of a lower retry, so it is passed over; what is complete stays so. An end that only another version
    knows holds the gang as it is, until somebody asks for a retry.
    """
    return end.state is not State.COMPLETE and end.retry < run.restart.retry


def _ended(gang: Gang, end: EndRecord) -> Gang:
    ended = replace(gang, phase=Phase.ENDED, ending=Finish(end.state, end.message), attempt=end.attempt, restarts=end.restarts)
    return replace(ended, failure=end.failure, checkpoint=end.checkpoint, result=end.result)
