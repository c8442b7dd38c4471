"""TrainingJob.status: from what is observed and reported, within the bounds of its CRD, and whether it is due to be written. Pure.

What node 0 reports comes from a pod, whose image a user chose. The API server refuses a status as a whole for one field that is too long,
out of range or no time, and etcd one that is too large with its job: then nobody would hear of the job's end either.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from functools import cache, lru_cache
from typing import Any

from lockstep.api.names import LABEL_JOB
from lockstep.api.objects import Object, condition, is_running
from lockstep.api.preflightstatus import AllReduceStatus, PreflightFinding, PreflightStatus, SelfTestStatus
from lockstep.api.schema import Schema, structural_schema
from lockstep.api.status import (
    EXCLUDED_MAX,
    LONG_TEXT_MAX,
    ActiveTime,
    CheckpointStatus,
    ClusterInUse,
    ConditionType,
    ExcludedNode,
    FabricDifference,
    FabricStatus,
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
)
from lockstep.api.statuspart import taken_from, unchecked
from lockstep.plan.observed import Observed
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.clocks import retry_of
from lockstep.plan.reconcile.conditions import View, facts, with_times
from lockstep.plan.reconcile.interactive import interactive_status, is_stopped
from lockstep.plan.reconcile.measures import goodput_status, is_stale
from lockstep.plan.render.objects import Frozen
from lockstep.plan.times import not_ahead, remaining, seconds_of, timestamp
from lockstep.plan.waiting.nodes import fitting_nodes
from lockstep_gang.contract.fabric import FabricReport
from lockstep_gang.contract.messages import COUNT_MAX
from lockstep_gang.contract.preflight import Bandwidth, Finding, PreflightReport, Speed
from lockstep_gang.contract.report import HISTORY, Cause, CheckpointReport, Failure, Report, Restart, TrainerReport
from lockstep_spec.words import printable_line

PROGRESS_SECONDS = 15.0
LAST_LINES = 20
_NOTE_CHARACTERS = 256
_WORD = re.compile(r"[\w.:+-]{0,64}", re.ASCII)
_READ = frozenset({ConditionType.PROGRESSING, ConditionType.COMPLETE, ConditionType.FAILED})
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
    pods = observed.pods if view.held_until is not None or not view.end.finished else ()  # those of a job that ended are on their way out
    started = before.get("startTime") or (timestamp(view.now) if observed.pods else None)
    own = unchecked(
        TrainingJobStatus,
        observed_generation=observed.generation,
        conditions=with_times(observed, facts(view), view.now),
        nodes=len(pods),
        running_nodes=sum(map(is_running, pods)),
        selector=f"{LABEL_JOB}={observed.name}",
        start_time=started,
        completion_time=(not_ahead(before.get("completionTime"), view.now) or timestamp(view.now)) if view.end.finished else None,
        retry=(retry_of(running) or None) if running is not None else before.get("retry"),
        ranks=_ranks(view, running),
        cluster=cluster or ClusterInUse.stored(before.get("cluster")),
        stop=stop,
        active=active,
        placement=placement,
        interference=interference,
        excluded_nodes=_excluded_nodes(observed, view.report, running, timestamp(view.now)) or None,
        interactive=interactive_status(observed, view.received, timestamp(view.now)),
        run=unchecked(RunStatus, name=running.name, pending=pending) if running is not None else RunStatus.stored(before.get("run")),
        failure=_start_failure(view),
        checkpoint=None if view.commit is None else _commit(view.commit),  # it stays, whatever became of the pod that reported it
    )
    report = view.report or view.last_word
    reported = {} if report is None else reported_parts(observed, report, view.now).to_dict()
    carried = _LAST_KNOWN if report is not None else (*_LAST_KNOWN, *_REPORTED)
    return fitted({key: before[key] for key in carried if key in before} | own.to_dict() | reported)


def _ranks(view: View, running: Frozen | None) -> Ranks | None:
    before = Ranks.stored(view.observed.status.get("ranks") or None)
    if view.report is not None and view.observed.pods:
        # A coordinator that starts after the end has placed no rank.
        order = list(view.report.order) or (before.order if before is not None and view.end.finished else None)
        return unchecked(Ranks, desired=view.report.ranks.desired, ready=0 if view.end.finished else view.report.ranks.ready, order=order)
    if running is None:
        return before
    desired = running.nodes * running.parsed.ranks_per_node
    ready = before.ready if before is not None and view.observed.pods else 0
    return unchecked(Ranks, desired=desired, ready=ready, order=before.order if before is not None and desired == before.desired else None)


def _start_failure(view: View) -> FailureStatus | None:
    if not view.end.failed or view.end.reason != Reason.START_TIMEOUT:
        return None
    return unchecked(FailureStatus, cause=Cause.SETUP.value, node=0, message=printable_line(view.end.message))


def reported_parts(observed: Observed, report: Report, now: float) -> TrainingJobStatus:
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
        failed_saves=None if failed is None else taken_from(failed, FailedSavesStatus, message=failed.problem),
        failure=None if report.failure is None else _failure(observed, report.failure),
        fabric=None if report.fabric is None else fabric_status(observed, report.fabric),
        preflight=None if report.preflight is None else preflight_status(observed, report.preflight),
        result=ResultStatus.stored(report.result and {key: str(value) for key, value in report.result.items() if value}),
    )


def reported_ranks(report: Report, *, runs: bool) -> Object:
    """Return status.ranks of a job that is no pods'. `runs`: False where no rank can be ready."""
    ready, order = report.ranks.ready if runs else 0, list(report.order) or None
    return unchecked(Ranks, desired=report.ranks.desired, ready=ready, order=order).to_dict()


def _commit(commit: CheckpointReport) -> CheckpointStatus:
    step = max(0, min(commit.step, COUNT_MAX))
    return unchecked(CheckpointStatus, last_committed_step=step, last_commit_time=commit.time, path=commit.path)


def _trainer(observed: Observed, report: TrainerReport, now: float) -> TrainerStatus:
    step, total = _count(report.step), _count(report.total_steps)
    trainer = taken_from(
        report,
        TrainerStatus,
        step=step,
        total_steps=total,
        progress_percentage=min(100, 100 * step // total) if step is not None and total else None,
        metrics=[taken_from(metric, Metric) for metric in report.metrics],
    )
    before = observed.status_part("trainer")
    is_same = fitted({"trainer": trainer.to_dict()})["trainer"] == {k: v for k, v in before.items() if k != "lastUpdateTime"}
    updated = not_ahead(before.get("lastUpdateTime"), now) if is_same else None
    return trainer.model_copy(update={"last_update_time": updated or timestamp(now)})


def _count(number: int | None) -> int | None:
    """Return None for a number that the API server does not take as a count."""
    return number if number is not None and 0 <= number <= COUNT_MAX else None


def _failure(observed: Observed, failure: Failure) -> FailureStatus:
    before = FailureStatus.stored(observed.status.get("failure"))
    is_same = before is not None and before.node == failure.node and before.message == failure.message[:LONG_TEXT_MAX]
    node_name = observed.node_name(failure.node) or (before.node_name if before is not None and is_same else None)
    return taken_from(failure, FailureStatus, node_name=node_name, last_lines=list(failure.last_lines[-LAST_LINES:]))


def _restart(restart: Restart) -> RestartStatus:
    failure = restart.failure
    return taken_from(
        restart,
        RestartStatus,
        time=restart.failed,
        cause=failure.cause or Cause.INTERNAL,
        message=failure.message,
        rank=failure.rank,
        node=failure.node,
    )


def fabric_status(observed: Observed, fabric: FabricReport) -> FabricStatus:
    before = FabricStatus.stored(observed.status.get("fabric"))
    names = {item.node: item.node_name for item in before.differing} if before is not None else {}
    differing = [
        taken_from(ranks, FabricDifference, node_name=observed.node_name(ranks.node) or names.get(ranks.node)) for ranks in fabric.differing
    ]
    return taken_from(fabric, FabricStatus, differing=differing)


def preflight_status(observed: Observed, result: PreflightReport) -> PreflightStatus:
    """Return status.preflight. A node's name is read while its pod is there, and stays after that."""
    before = PreflightStatus.stored(observed.status.get("preflight"))
    names = {finding.node: finding.node_name for finding in before.findings} if before is not None and before.time == result.time else {}
    return taken_from(
        result,
        PreflightStatus,
        checks=len(result.checks),
        findings=[
            taken_from(finding, PreflightFinding, node_name=names.get(finding.node) or observed.node_name(finding.node))
            for finding in result.findings
        ],
        all_reduce=None if result.all_reduce is None else _bandwidth(result.all_reduce),
        self_test=None if result.self_test is None else _speed(result.self_test),
    )


def _speed(speed: Speed) -> SelfTestStatus:
    slowest, fastest = (f"{flops / 1e12:.3f}" for flops in (speed.slowest, speed.fastest))
    return taken_from(speed, SelfTestStatus, slowest_tflops=slowest, fastest_tflops=fastest)


def _bandwidth(measured: Bandwidth) -> AllReduceStatus:
    return taken_from(measured, AllReduceStatus, busbw=f"{measured.bytes_per_second / 1e9:.3f}")


def _excluded_nodes(observed: Observed, report: Report | None, running: Frozen | None, time: str) -> list[ExcludedNode]:
    """Return status.excludedNodes: those that preflight found bad for the job, which its next start from zero leaves out. Suspending a job
    clears the list.

    Only what can be replaced is left out: with no other node free to take the pod, the job would wait for ever instead of failing with the
    node's name. Status has the list first, the pods go after that, so that an operator that ends in between loses nothing.
    """
    if is_stopped(observed):
        return []
    excluded = [node for item in observed.status.get("excludedNodes") or [] if (node := ExcludedNode.stored(item)) is not None]
    bad = _bad_nodes(observed, report) if running is not None else {}
    for name, finding in bad.items():
        names = {node.name for node in excluded}
        is_new = name not in names and len(excluded) < EXCLUDED_MAX
        if is_new and running is not None and _enough_without(observed, names | {name}, running.nodes):
            excluded.append(unchecked(ExcludedNode, name=name, time=time, message=finding.message))
    return excluded


def _bad_nodes(observed: Observed, report: Report | None) -> dict[str, Finding]:
    """Node → preflight's finding, from the pods that were there at the time."""
    result = report.preflight if report is not None else None
    bad: dict[str, Finding] = {}
    for finding in result.findings if result is not None and not result.ok else ():
        pod = observed.pod(finding.node) if finding.excludes and finding.node is not None else None
        if pod is not None and result is not None and pod["metadata"].get("creationTimestamp", "") <= result.time:
            bad[pod["spec"].get("nodeName", "")] = finding
    return {name: finding for name, finding in bad.items() if name}


def _enough_without(observed: Observed, excluded: set[str], nodes: int) -> bool:
    fitting = set(fitting_nodes(observed.pods[0], observed.nodes)) if observed.pods else set()
    return len(fitting - excluded) >= nodes


def due(before: Object, after: Object, now: float) -> tuple[bool, float | None]:
    """Return whether to write it now, and else in how many seconds.

    A transition is written at once, progress (step, metrics, checkpoint) at most every 15 s: a thousand jobs must not
    keep the API server busy with numbers.
    """
    if before == after:
        return False, None
    if {k: v for k, v in before.items() if k not in _PROGRESS} != {k: v for k, v in after.items() if k not in _PROGRESS}:
        return True, None
    if {k: v for k, v in before.items() if k != "goodput"} == {k: v for k, v in after.items() if k != "goodput"}:
        return is_stale(before, after), None
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
    conditions = {c["type"]: (c["status"], c["reason"], c["message"]) for c in status.get("conditions", []) if c["type"] not in _CONDITIONS}
    return {key: value for key, value in status.items() if key not in _FIELDS}, conditions


STATUS_BYTES_MAX = 256 << 10
"""Bytes of a job's whole status, as the API server stores it. etcd takes requests of 1.5 MiB, and the job is in the same one."""
_SHORTER = (2048, 1024, 512, 256)
"""Bytes to which every text is cut, one after the other, until the status fits. With the last one it does: lists are bounded, too."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_LEFT_OUT = object()


def fitted(status: Object) -> Object:
    """The same status as the CRD takes it: texts and lists cut, what still breaks its schema left out, at most STATUS_BYTES_MAX in all."""
    fits: Object = _fitted(status, _schema(), is_whole=True)
    for most in _SHORTER:
        if stored_bytes(fits) <= STATUS_BYTES_MAX:
            break
        fits = _shortened(fits, most)
    return fits


def readable(status: Object) -> Object:
    """A stored status without what isn't as its schema says, and without what requires that: whoever wrote it, it can be computed with.

    The API server takes times that nothing can compute with. What is absent, in a status of another version, is nobody's fault.
    """
    fits: Object = _fitted(status, _schema(), is_whole=False)
    return fits


def stored_bytes(value: Any) -> int:
    """Bytes of its JSON, as the largest of the two writers has it: Python's escapes what isn't ASCII, the API server's three characters of
    HTML.
    """
    text = json.dumps(value, separators=(",", ":"))
    return len(text) + 5 * sum(text.count(character) for character in "<>&")


@cache
def _schema() -> Schema:
    return structural_schema(TrainingJobStatus, described=False)


def _fitted(value: Any, schema: Schema, *, is_whole: bool) -> Any:
    """`is_whole`: what lacks a required field is left out, too, and not only what has a wrong one."""
    kind = schema["type"]
    if kind == "string" and isinstance(value, str):
        return _fitted_text(value, schema)
    if kind == "object" and isinstance(value, dict):
        return _fitted_object(value, schema, is_whole=is_whole)
    if kind == "array" and isinstance(value, list):
        items = [_fitted(item, schema["items"], is_whole=is_whole) for item in value[: schema["maxItems"]]]
        return [item for item in items if item is not _LEFT_OUT]
    if kind == "boolean":
        return value if isinstance(value, bool) else _LEFT_OUT
    is_number = kind == "integer" and isinstance(value, int) and not isinstance(value, bool)
    least = schema.get("minimum", -COUNT_MAX)
    return value if is_number and least <= value <= schema.get("maximum", COUNT_MAX) else _LEFT_OUT


def _fitted_object(value: Object, schema: Schema, *, is_whole: bool) -> Any:
    fields = schema["properties"]
    fits = {}
    for name, item in value.items():
        fitting = _LEFT_OUT if item is None or name not in fields else _fitted(item, fields[name], is_whole=is_whole)
        if fitting is not _LEFT_OUT:
            fits[name] = fitting
    return fits if all(name in fits for name in schema.get("required", ()) if is_whole or name in value) else _LEFT_OUT


def _fitted_text(text: str, schema: Schema) -> Any:
    if schema.get("format") == "date-time":
        return text if len(text) <= schema["maxLength"] and _is_time(text) else _LEFT_OUT
    if "enum" in schema:
        return text if text in schema["enum"] else _LEFT_OUT
    cut = text[: schema["maxLength"]]
    return cut if "pattern" not in schema or re.search(schema["pattern"], cut) else _LEFT_OUT


@lru_cache(1024)
def _is_time(text: str) -> bool:
    """Return True if it can be computed with. The API server takes more: the year 0, and an offset of 99 hours."""
    try:
        return bool(_TIME.fullmatch(text)) and seconds_of(text) is not None
    except ValueError:
        return False


def _shortened(value: Any, most: int) -> Any:
    """Every text in it cut to so many bytes."""
    if isinstance(value, dict):
        return {key: _shortened(item, most) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item, most) for item in value]
    if not isinstance(value, str) or stored_bytes(value) <= most + 2:
        return value
    return value[: bisect_right(range(len(value) + 1), most + 2, key=lambda length: stored_bytes(value[:length])) - 1]


def smaller_statuses(status: Object, refusal: str) -> tuple[Object, Object]:
    """Return what is tried where the API server refuses the status: it without its lists, such as last lines, and it without words, too.

    State, reasons and counts stay. The conditions that people read say that something is missing, and why.
    """
    note, others, conditions = f"StatusRefused: {refusal}"[:_NOTE_CHARACTERS], _without_lists(status), status["conditions"]
    noted = [{**one, "message": f"{one['message']}; {note}"[:LONG_TEXT_MAX]} if one["type"] in _READ else one for one in conditions]
    silent = [{**one, "message": note if one["type"] in _READ else ""} for one in conditions]
    return {**others, "conditions": noted}, {**_without_words(others), "conditions": silent}


def _without_lists(part: Object) -> Object:
    kept = {key: value for key, value in part.items() if not isinstance(value, list)}
    return {key: _without_lists(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _without_words(value: Any) -> Any:
    """Empty each text that is no name, number, time or word of Lockstep's."""
    if isinstance(value, dict):
        return {key: _without_words(inner) for key, inner in value.items()}
    return "" if isinstance(value, str) and not _WORD.fullmatch(value) else value
