"""TrainingJob.status: from what is observed and reported, and whether it is due to be written."""

from __future__ import annotations

from lockstep.api.names import LABEL_JOB
from lockstep.api.objects import Object, is_running
from lockstep.api.status import (
    LONG_TEXT_MAX,
    ActiveTime,
    CheckpointStatus,
    ClusterInUse,
    FailedSavesStatus,
    FailureStatus,
    InterferenceStatus,
    Metric,
    PlacementStatus,
    Ranks,
    RestartStatus,
    ResultStatus,
    RunStatus,
    StopStatus,
    TrainerStatus,
    TrainingJobStatus,
    unchecked,
)
from lockstep.plan.decide.excluded import excluded_nodes
from lockstep.plan.decide.interactive import interactive_status
from lockstep.plan.decide.retry import retry_of
from lockstep.plan.observed import Observed
from lockstep.plan.reasons import Reason
from lockstep.plan.render.objects import Frozen
from lockstep.plan.status.conditions import View, facts, with_times
from lockstep.plan.status.goodput import goodput_status, is_stale
from lockstep.plan.status.notify import notification_status
from lockstep.plan.status.reported import fabric_status, preflight_status
from lockstep.plan.status.statussize import fitted
from lockstep.plan.times import not_ahead, remaining, seconds_of, timestamp
from lockstep_gang.contract import Cause, CheckpointReport, Failure, Report, Restart, TrainerReport, printable_line

PROGRESS_SECONDS = 15.0
COUNT_MAX = 2**63 - 1
LAST_LINES, HISTORY = 20, 10
_PROGRESS = ("trainer", "checkpoint", "goodput")
_LAST_KNOWN = ("trainer", "checkpoint", "failure", "fabric", "preflight", "result", "goodput")
"""Parts that stay as they were until a report has another."""
_REPORTED = ("attempts", "restarts", "restartsCountTowardsMax", "restartHistory", "failedSaves")
"""Parts of which every report says all; without one they stay as they were."""


def job_status(
    view: View,
    running: Frozen | None,
    *,
    cluster: ClusterInUse | None,
    pending: bool,
    stop: StopStatus | None,
    active: ActiveTime | None,
    placement: PlacementStatus | None,
    interference: InterferenceStatus | None,
) -> Object:
    """Return the whole status, `fitted`. What is not reported (there was no report since the operator's start) stays as it was."""
    observed, before = view.observed, view.observed.status
    pods = observed.pods if view.held_until is not None or not view.finished else ()  # those of a job that ended are on their way out
    started = before.get("startTime") or (timestamp(view.now) if observed.pods else None)
    own = unchecked(
        TrainingJobStatus,
        observed_generation=observed.generation,
        conditions=with_times(observed, facts(view), view.now),
        nodes=len(pods),
        running_nodes=sum(map(is_running, pods)),
        selector=f"{LABEL_JOB}={observed.name}",
        notification=notification_status(observed),
        start_time=started,
        completion_time=(not_ahead(before.get("completionTime"), view.now) or timestamp(view.now)) if view.finished else None,
        retry=(retry_of(running) or None) if running is not None else before.get("retry"),
        ranks=_ranks(view, running),
        cluster=cluster or ClusterInUse.stored(before.get("cluster")),
        stop=stop,
        active=active,
        placement=placement,
        interference=interference,
        excluded_nodes=excluded_nodes(observed, view.report, running, timestamp(view.now)) or None,
        interactive=interactive_status(observed, view.received, timestamp(view.now)),
        run=unchecked(RunStatus, name=running.name, pending=pending) if running is not None else RunStatus.stored(before.get("run")),
        failure=_start_failure(view),
        checkpoint=None if view.commit is None else _commit(view.commit),  # it stays, whatever became of the pod that reported it
    )
    report = view.report or view.last_word
    reported = {} if report is None else _reported(observed, report, view.now).to_dict()
    carried = _LAST_KNOWN if report is not None else (*_LAST_KNOWN, *_REPORTED)
    return fitted({key: before[key] for key in carried if key in before} | own.to_dict() | reported)


def _ranks(view: View, running: Frozen | None) -> Ranks | None:
    before = Ranks.stored(view.observed.status.get("ranks") or None)
    if view.report is not None and view.observed.pods:
        # A coordinator that starts after the end has placed no rank.
        order = list(view.report.order) or (before.order if before is not None and view.finished else None)
        return unchecked(Ranks, desired=view.report.ranks.desired, ready=0 if view.finished else view.report.ranks.ready, order=order)
    if running is None:
        return before
    desired = running.nodes * running.parsed.ranks_per_node
    ready = before.ready if before is not None and view.observed.pods else 0
    return unchecked(Ranks, desired=desired, ready=ready, order=before.order if before is not None and desired == before.desired else None)


def _start_failure(view: View) -> FailureStatus | None:
    if not view.failed or view.failure_reason != Reason.START_TIMEOUT:
        return None
    return unchecked(FailureStatus, cause=Cause.SETUP.value, node=0, message=printable_line(view.failure_message))


def _reported(observed: Observed, report: Report, now: float) -> TrainingJobStatus:
    """Return the parts that this report decides."""
    failed = report.failed_saves
    return unchecked(
        TrainingJobStatus,
        attempts=report.attempt,
        restarts=report.restarts,
        restarts_count_towards_max=report.restarts_counted,
        restart_history=[_restart(restart) for restart in report.history[-HISTORY:]] or None,
        goodput=goodput_status(observed, report),
        trainer=None if report.trainer is None else _trainer(observed, report.trainer, now),
        checkpoint=None if report.checkpoint is None else _commit(report.checkpoint),
        failed_saves=None
        if failed is None
        else unchecked(FailedSavesStatus, since=failed.since, count=failed.count, step=failed.step, message=failed.problem),
        failure=None if report.failure is None else _failure(observed, report.failure),
        fabric=None if report.fabric is None else fabric_status(observed, report.fabric),
        preflight=None if report.preflight is None else preflight_status(observed, report.preflight),
        result=ResultStatus.stored(report.result and {key: str(value) for key, value in report.result.items() if value}),
    )


def _commit(commit: CheckpointReport) -> CheckpointStatus:
    step = max(0, min(commit.step, COUNT_MAX))
    return unchecked(CheckpointStatus, last_committed_step=step, last_commit_time=commit.time, path=commit.path)


def _trainer(observed: Observed, report: TrainerReport, now: float) -> TrainerStatus:
    step, total = _count(report.step), _count(report.total_steps)
    trainer = unchecked(
        TrainerStatus,
        activity=report.activity,
        step=step,
        total_steps=total,
        progress_percentage=min(100, 100 * step // total) if step is not None and total else None,
        estimated_remaining_seconds=report.estimated_remaining_seconds,
        metrics=[unchecked(Metric, name=metric.name, value=metric.value) for metric in report.metrics],
    )
    before = observed.status.get("trainer") or {}
    is_same = fitted({"trainer": trainer.to_dict()})["trainer"] == {k: v for k, v in before.items() if k != "lastUpdateTime"}
    updated = not_ahead(before.get("lastUpdateTime"), now) if is_same else None
    return trainer.model_copy(update={"last_update_time": updated or timestamp(now)})


def _count(number: int | None) -> int | None:
    """Return None for a number that the API server does not take as a count."""
    return number if number is not None and 0 <= number <= COUNT_MAX else None


def _failure(observed: Observed, failure: Failure) -> FailureStatus:
    before = FailureStatus.stored(observed.status.get("failure"))
    is_same = before is not None and before.node == failure.node and before.message == failure.message[:LONG_TEXT_MAX]
    return unchecked(
        FailureStatus,
        rank=failure.rank,
        node=failure.node,
        node_name=observed.node_name(failure.node) or (before.node_name if before is not None and is_same else None),
        exit_code=failure.exit_code,
        signal=failure.signal,
        exception=failure.exception,
        cause=failure.cause and failure.cause.value,
        step=failure.step,
        activity=failure.activity,
        stacks=failure.stacks,
        message=failure.message,
        last_lines=list(failure.last_lines[-LAST_LINES:]),
    )


def _restart(restart: Restart) -> RestartStatus:
    failure = restart.failure
    return unchecked(
        RestartStatus,
        attempt=restart.attempt,
        time=restart.failed,
        cause=(failure.cause or Cause.INTERNAL).value,
        message=failure.message,
        rank=failure.rank,
        node=failure.node,
        lost_steps=restart.lost_steps,
        downtime_seconds=restart.downtime_seconds,
        down_since=restart.down_since,
        counts=restart.counts,
    )


def due(before: Object, wanted: Object, now: float) -> tuple[bool, float | None]:
    """Whether to write it now, and else in how many seconds.

    A transition is written at once, progress (step, metrics, checkpoint) at most every 15 s: a thousand jobs must not
    keep the API server busy with numbers.
    """
    if before == wanted:
        return False, None
    if {k: v for k, v in before.items() if k not in _PROGRESS} != {k: v for k, v in wanted.items() if k not in _PROGRESS}:
        return True, None
    if {k: v for k, v in before.items() if k != "goodput"} == {k: v for k, v in wanted.items() if k != "goodput"}:
        return is_stale(before, wanted), None
    last = (before.get("trainer") or {}).get("lastUpdateTime")
    is_ahead = last is not None and seconds_of(last) > now + 1  # by a clock that was fast: waiting for it may take for ever
    wait = 0.0 if last is None or is_ahead else remaining(seconds_of(last), PROGRESS_SECONDS, now)
    return (True, None) if wait <= 0 else (False, wait)
