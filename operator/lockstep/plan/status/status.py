"""TrainingJob.status: from what is observed and reported, and whether it is due to be written."""

from __future__ import annotations

from typing import Any

from lockstep.api.names import LABEL_JOB
from lockstep.api.objects import Object, is_running
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
from lockstep_gang.contract import Cause, CheckpointReport, Failure, Report, Restart, printable_line

PROGRESS_SECONDS = 15.0
TEXT, LONG_TEXT, VALUE = 1024, 4096, 64
COUNT_MAX = 2**63 - 1
LAST_LINES, METRICS, HISTORY = 20, 32, 10
_PROGRESS = ("trainer", "checkpoint", "goodput")
RESULT_FIELDS = {"adapter": TEXT, "model": TEXT, "evalLossBefore": VALUE, "evalLossAfter": VALUE, "note": TEXT}


def job_status(view: View, running: Frozen | None, profile: Object | None, life: Object, pending: bool) -> Object:
    """The whole status, `fitted`; `life` has `stop` and `active`. What nobody says any more (no report since the operator's start) stays as it was."""
    observed, before = view.observed, view.observed.status
    status: dict[str, Any] = {
        "observedGeneration": observed.generation,
        "conditions": with_times(observed, facts(view), view.now),
        "nodes": len(observed.pods)
        if view.held_until is not None or not view.finished
        else 0,  # those of a job that ended are on their way out
        "runningNodes": sum(map(is_running, observed.pods)) if view.held_until is not None or not view.finished else 0,
        "selector": f"{LABEL_JOB}={observed.name}",
        "notification": notification_status(observed),
        "startTime": before.get("startTime") or (timestamp(view.now) if observed.pods else None),
        "completionTime": (not_ahead(before.get("completionTime"), view.now) or timestamp(view.now)) if view.finished else None,
        "retry": (retry_of(running) or None) if running is not None else before.get("retry"),
        "ranks": _ranks(view, running),
        "cluster": profile or before.get("cluster"),
        **life,
        "excludedNodes": excluded_nodes(observed, view.report, running, timestamp(view.now)) or None,
        "interactive": interactive_status(observed, view.received, timestamp(view.now)),
        "run": {"name": running.name, "pending": pending} if running is not None else before.get("run"),
        **{
            key: before.get(key)
            for key in (
                "attempts",
                "restarts",
                "restartsCountTowardsMax",
                "restartHistory",
                "trainer",
                "checkpoint",
                "failedSaves",
                "failure",
                "fabric",
                "preflight",
                "result",
                "goodput",
            )
        },
    }
    if view.failed and view.failure_reason == Reason.START_TIMEOUT:
        status["failure"] = {"cause": Cause.SETUP.value, "node": 0, "message": printable_line(view.failure_message)[:LONG_TEXT]}
    if view.commit is not None:  # a commit stays, whatever became of the pod that told of it
        status["checkpoint"] = _commit(view.commit)
    said = view.report or view.last_word
    if said is not None:
        status |= _reported(observed, said, view.now)
    return fitted({key: value for key, value in status.items() if value is not None})


def _ranks(view: View, running: Frozen | None) -> Object | None:
    before = view.observed.status.get("ranks") or {}
    if view.report is not None and view.observed.pods:
        ready = 0 if view.finished else view.report.ranks.ready
        kept = before.get("order", []) if view.finished else []  # a coordinator that comes after the end has placed no rank
        return {"desired": view.report.ranks.desired, "ready": ready} | _order(list(view.report.order) or kept)
    if running is None:
        return before or None
    desired = running.nodes * running.parsed.ranks_per_node
    order = before.get("order", []) if desired == before.get("desired") else []
    return {"desired": desired, "ready": before.get("ready", 0) if view.observed.pods else 0} | _order(order)


def _order(order: list[int]) -> Object:
    return {"order": order} if order else {}


def _reported(observed: Observed, report: Report, now: float) -> Object:
    found: dict[str, Any] = {
        "attempts": report.attempt,
        "restarts": report.restarts,
        "restartsCountTowardsMax": report.restarts_counted,
        "restartHistory": [_restart(restart) for restart in report.history[-HISTORY:]] or None,
    }
    if (goodput := goodput_status(observed, report)) is not None:
        found["goodput"] = goodput
    if report.trainer is not None:
        found["trainer"] = _trainer(observed.status.get("trainer") or {}, report, now)
    if report.checkpoint is not None:
        found["checkpoint"] = _commit(report.checkpoint)
    failed = report.failed_saves
    found["failedSaves"] = failed and {
        "since": failed.since,
        "count": _count(failed.count),
        "step": _count(failed.step),
        "message": failed.problem[:TEXT],
    }
    if report.failure is not None:
        found["failure"] = _failure(observed, report.failure)
    if report.fabric is not None:
        found["fabric"] = fabric_status(observed, report.fabric)
    if report.preflight is not None:
        found["preflight"] = preflight_status(observed, report.preflight)
    if report.result is not None:
        found["result"] = {key: str(report.result[key])[:size] for key, size in RESULT_FIELDS.items() if report.result.get(key)}
    return found


def _commit(commit: CheckpointReport) -> Object:
    return {"lastCommittedStep": max(0, min(commit.step, COUNT_MAX)), "lastCommitTime": commit.time, "path": commit.path[:TEXT]}


def _trainer(before: Object, report: Report, now: float) -> Object:
    said = report.trainer
    assert said is not None  # noqa: S101 (the caller asked)
    step, total = _count(said.step), _count(said.total_steps)
    fields = {
        "activity": said.activity and said.activity[:TEXT],
        "step": step,
        "totalSteps": total,
        "progressPercentage": min(100, 100 * step // total) if step is not None and total else None,
        "estimatedRemainingSeconds": _count(said.estimated_remaining_seconds),
        "metrics": [{"name": m.name[:VALUE], "value": m.value[:VALUE]} for m in said.metrics[:METRICS]],
    }
    found = {key: value for key, value in fields.items() if value is not None}
    unchanged = found == {key: value for key, value in before.items() if key != "lastUpdateTime"}
    return {**found, "lastUpdateTime": (not_ahead(before.get("lastUpdateTime"), now) if unchanged else None) or timestamp(now)}


def _count(number: int | None) -> int | None:
    """None for what the API server takes for no count: it would refuse the whole status, the job's end with it."""
    return number if number is not None and 0 <= number <= COUNT_MAX else None


def _failure(observed: Observed, failure: Failure) -> Object:
    pod = None if failure.node is None else observed.pod(failure.node)
    known = observed.status.get("failure") or {}
    same = known.get("node") == failure.node and known.get("message") == failure.message[:LONG_TEXT]
    fields = {
        "rank": failure.rank,
        "node": failure.node,
        "nodeName": (pod or {}).get("spec", {}).get("nodeName") or (known.get("nodeName") if same else None),
        "exitCode": failure.exit_code,
        "signal": failure.signal,
        "exception": failure.exception and failure.exception[:TEXT],
        "cause": failure.cause and failure.cause.value,
        "step": _count(failure.step),
        "activity": failure.activity and failure.activity[:TEXT],
        "stacks": failure.stacks and failure.stacks[:TEXT],
        "message": failure.message[:LONG_TEXT],
        "lastLines": [line[:TEXT] for line in failure.last_lines[-LAST_LINES:]],
    }
    return {key: value for key, value in fields.items() if value is not None}


def _restart(restart: Restart) -> Object:
    failure = restart.failure
    fields = {
        "attempt": restart.attempt,
        "time": restart.failed,
        "cause": (failure.cause or Cause.INTERNAL).value,
        "message": failure.message[:TEXT],
        "rank": failure.rank,
        "node": failure.node,
        "lostSteps": _count(restart.lost_steps),
        "downtimeSeconds": restart.downtime_seconds,
        "downSince": restart.down_since,
        "counts": restart.counts,
    }
    return {key: value for key, value in fields.items() if value is not None}


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
