"""TrainingJob.status: from what is observed and reported, and whether it is due to be written."""

from __future__ import annotations

from lockstep.api.names import LABEL_JOB
from lockstep.api.objects import Object, condition, is_running
from lockstep.api.status import (
    LONG_TEXT_MAX,
    ActiveTime,
    AllReduceStatus,
    CheckpointStatus,
    ClusterInUse,
    ConditionType,
    FabricDifference,
    FabricStatus,
    FailedSavesStatus,
    FailureStatus,
    InterferenceStatus,
    Metric,
    PlacementStatus,
    PreflightFinding,
    PreflightStatus,
    Ranks,
    RestartStatus,
    ResultStatus,
    RunStatus,
    StopStatus,
    TrainerStatus,
    TrainingJobStatus,
)
from lockstep.api.statuspart import unchecked
from lockstep.plan.observed import Observed
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.clocks import retry_of
from lockstep.plan.reconcile.conditions import View, facts, with_times
from lockstep.plan.reconcile.excluded import excluded_nodes
from lockstep.plan.reconcile.goodput import goodput_status, is_stale
from lockstep.plan.reconcile.interactive import interactive_status
from lockstep.plan.reconcile.notify import notification_status
from lockstep.plan.reconcile.statussize import fitted
from lockstep.plan.render.objects import Frozen
from lockstep.plan.times import not_ahead, remaining, seconds_of, timestamp
from lockstep_gang.contract.fabric import FabricReport
from lockstep_gang.contract.preflight import Bandwidth, Finding, PreflightReport
from lockstep_gang.contract.report import Cause, CheckpointReport, Failure, Report, Restart, TrainerReport
from lockstep_spec.words import printable_line

PROGRESS_SECONDS = 15.0
COUNT_MAX = 2**63 - 1
LAST_LINES, HISTORY = 20, 10
SETTLE_SECONDS = 2.0
"""Seconds that a change that `is_passing` may wait for the next."""
_ON_THE_WAY = frozenset({Reason.PODS_NOT_CREATED, Reason.SCHEDULING, Reason.STARTING})
_NOT_READY = frozenset({Reason.PODS_NOT_SCHEDULED, Reason.STARTING, Reason.WAITING_FOR_REPORT})
_CONDITIONS = frozenset({ConditionType.PODS_SCHEDULED, ConditionType.RANKS_READY, ConditionType.PROGRESSING, ConditionType.SUSPENDED})
_FIELDS = frozenset({"conditions", "observedGeneration", "nodes", "runningNodes", "startTime", "active", "ranks", "run", "cluster"})
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


def fabric_status(observed: Observed, fabric: FabricReport) -> FabricStatus:
    """Return status.fabric."""
    before = FabricStatus.stored(observed.status.get("fabric"))
    names = {item.node: item.node_name for item in before.differing} if before is not None else {}
    return unchecked(
        FabricStatus,
        transport=fabric.transport,
        network=fabric.network,
        hcas=list(fabric.hcas),
        link=fabric.link,
        interfaces=list(fabric.interfaces),
        gpu_direct=fabric.gpu_direct,
        nccl_version=fabric.nccl_version,
        ranks_heard=fabric.ranks_heard,
        differing=[
            unchecked(
                FabricDifference,
                node=ranks.node,
                node_name=observed.node_name(ranks.node) or names.get(ranks.node),
                ranks=ranks.ranks,
                why=ranks.why,
            )
            for ranks in fabric.differing
        ],
    )


def preflight_status(observed: Observed, result: PreflightReport) -> PreflightStatus:
    """Return status.preflight. A node's name is read while its pod is there, and stays after that."""
    before = PreflightStatus.stored(observed.status.get("preflight"))
    names = {finding.node: finding.node_name for finding in before.findings} if before is not None and before.time == result.time else {}
    return unchecked(
        PreflightStatus,
        time=result.time,
        ok=result.ok,
        checks=len(result.checks),
        nodes=result.nodes,
        milliseconds=result.milliseconds,
        findings=[_finding(observed, finding, names.get(finding.node)) for finding in result.findings],
        omitted=result.omitted,
        all_reduce=None if result.all_reduce is None else _bandwidth(result.all_reduce),
    )


def _finding(observed: Observed, finding: Finding, name: str | None) -> PreflightFinding:
    return unchecked(
        PreflightFinding,
        check=finding.check,
        severity=finding.severity,
        node=finding.node,
        node_name=name or observed.node_name(finding.node),
        message=finding.message,
        fix=finding.fix,
    )


def _bandwidth(measured: Bandwidth) -> AllReduceStatus:
    return unchecked(AllReduceStatus, ranks=measured.ranks, bytes=measured.bytes, busbw=f"{measured.bytes_per_second / 1e9:.3f}")


def due(before: Object, wanted: Object, now: float) -> tuple[bool, float | None]:
    """Return whether to write it now, and else in how many seconds.

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


def is_passing(before: Object, after: Object) -> bool:
    """Return True if the two differ only by how far the start of a job's pods has come, a resumed job's included."""
    if _reason(before, ConditionType.PROGRESSING) not in _ON_THE_WAY | {Reason.SUSPENDED}:
        return False
    if _reason(after, ConditionType.PROGRESSING) not in _ON_THE_WAY or _reason(after, ConditionType.RANKS_READY) not in _NOT_READY:
        return False
    return _others(before) == _others(after)


def _reason(status: Object, kind: ConditionType) -> str:
    return str(condition(status, kind).get("reason", ""))


def _others(status: Object) -> tuple[Object, dict[str, tuple[str, str, str]]]:
    """All but what a start changes."""
    said = {c["type"]: (c["status"], c["reason"], c["message"]) for c in status.get("conditions", []) if c["type"] not in _CONDITIONS}
    return {key: value for key, value in status.items() if key not in _FIELDS}, said
