"""Records in the folder of a `--local` run: as a job's status, and as a run to retry."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.api.names import ANNOTATION_TYPED, DELETED
from lockstep.api.objects import Object, condition, go_on_words, typed_command
from lockstep.plan.hosts.status import UNWRITTEN_SECONDS, report_of
from lockstep.plan.observed import Observed
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.clocks import Earlier
from lockstep.plan.reconcile.conditions import reported_progress
from lockstep.plan.reconcile.status import fitted, reported_parts, reported_ranks
from lockstep.plan.times import timestamp
from lockstep.platforms.jobs.machine import LOCK
from lockstep.platforms.onhost.readings import object_in
from lockstep_gang.contract.report import ENDS, Report, State
from lockstep_spec.files import lacks_room, mount_of, room_words

COMPLETE = "the job is complete"
_OF_A_FAILURE = ("rank", "node", "exitCode", "signal", "exception", "cause", "step", "message", "lastLines")


def observed_run(job: str, root: Path, again: str = "--local") -> Observed:
    """Return the newest run of this name. `again`: words that lead to it on a command line. Raises ConfigError when its records can't be
    read.
    """
    folder = root / "workspace" / "runs" / job
    with _readable(job, folder) as (attempts, end):
        uid = attempts[-1]["jobUid"]
        run = object_in(folder / "logs/output/run.json")
        spec = _spec(run) if (run.get("job") or {}).get("uid") == uid else {}
        report = report_of(object_in(path := folder / "gang/report.json").get("report"), uid)
        lock = folder / LOCK
        typed = lock.read_text(encoding="utf-8", errors="replace").partition("\n")[2].strip() if lock.is_file() else ""
        annotations = {ANNOTATION_TYPED: typed} if typed else {}  # the command that its newest start wrote below its process
        metadata = {"name": job, "namespace": "local", "uid": "local", "annotations": annotations}
        committed = bool(attempts[-1].get("checkpoint") or (report is not None and report.checkpoint))
        goes_on = f"to {go_on_words({'spec': spec}, committed=committed)}: {typed_command({'metadata': metadata}, again)}"
        status = _status(attempts, end, goes_on, runs=runs(folder))
        began = next(record["started"] for record in attempts if record["jobUid"] == uid)
        observed = Observed(job={"metadata": {**metadata, "creationTimestamp": began}, "spec": spec, "status": status})
        return observed if report is None else Observed(job={**observed.job, "status": _with_report(observed, report, path)})


def _spec(run: Object) -> Object:
    """Return what run.json says of the job: its nodes, how it restarts, and its training or its script."""
    command = [str(word) for word in run.get("command") or []]
    training = run.get("training")
    program = command[Path(command[0]).name.startswith("python") :] if command else []
    work = {"training": training} if training else {"script": {"command": program}} if program else {}
    return {"nodes": int(run["nodes"]), "restart": run.get("restart") or {}, **work}


def _with_report(observed: Observed, report: Report, path: Path) -> Object:
    """Return its status with what the coordinator has reported: as an operator would have written it, where the records say nothing
    else.
    """
    status, runs = observed.status, condition(observed.status, "Progressing").get("reason") == "Running"
    reported = reported_parts(observed, report, time.time()).to_dict()
    nodes = sum(node.connected for node in report.nodes) if runs else 0
    conditions = [_progressing(report, path), *status["conditions"][1:]] if runs else status["conditions"]
    return {
        **fitted({**reported, "ranks": reported_ranks(report, runs=runs), "nodes": len(report.nodes), "runningNodes": nodes}),
        "conditions": conditions,
    }


def _progressing(report: Report, path: Path) -> Object:
    """Return the condition of a run whose process is there, by its newest report in `path`, which may be old: no file tells that it can't
    be written.
    """
    written = path.stat().st_mtime
    if time.time() - written > UNWRITTEN_SECONDS:
        room = f": {room_words(mount_of(path))}" if lacks_room(path) else ""
        message = f"node 0 has not written {path} since {timestamp(written)}{room}. Its process runs: its output says what can't be written"
        return _condition("Progressing", "Unknown", Reason.NO_REPORT.value, message)
    fact = reported_progress(report)
    return _condition("Progressing", fact.status.value, fact.reason, fact.message)


def run_names(root: Path) -> list[str]:
    """Names of the runs in a workspace whose records are there, and which nobody has deleted, by name."""
    folders = (path.parent.parent for path in (root / "workspace" / "runs").glob("*/gang/attempts.jsonl"))
    return sorted(folder.name for folder in folders if not (folder / DELETED).exists())


def process_of(folder: Path) -> int | None:
    """Return the pid of the process that runs it now; None: none does."""
    if not runs(folder):
        return None
    text = (folder / LOCK).read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    return int(text) if text.isdecimal() else None


def failed_run(job: str, root: Path) -> Earlier:
    """Return the newest run of this name, which must have failed. Raises ConfigError."""
    folder = root / "workspace" / "runs" / job
    with _readable(job, folder) as (attempts, end):
        uid, retry = attempts[-1]["jobUid"], attempts[-1].get("retry", 0)
        state = end.get("state") if end.get("jobUid") == uid else None
    if state == "Complete":
        raise ConfigError(f"run {job} in {folder} is complete: there is nothing to retry")
    if state is None or end.get("retry", 0) < retry:
        raise ConfigError(f"run {job} in {folder} has not failed: `lockstep run` with its file starts it again")
    return Earlier(uid, end.get("retry", 0))


@contextlib.contextmanager
def _readable(job: str, run: Path) -> Iterator[tuple[list[Object], Object]]:
    """Records of all attempts, and of the end. Raises ConfigError for what can't be read, in the block, too: scripts can write there."""
    folder = run / "gang"
    try:
        attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text(encoding="utf-8").splitlines()]
        if not attempts:
            raise LookupError("no attempt was recorded")
        yield attempts, json.loads(path.read_text(encoding="utf-8")) if (path := folder / "end.json").exists() else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"no run {job} can be read in {folder} ({error}): name by --cluster the folder of `lockstep run`, unless that was the usual one"
        ) from None


def runs(folder: Path) -> bool:
    """Return True if a process of the run is there: it holds the lock as long as it lives."""
    try:
        with (folder / LOCK).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _status(attempts: list[Object], end: Object, goes_on: str, *, runs: bool) -> Object:
    newest = attempts[-1]
    ended = end if end.get("jobUid") == newest["jobUid"] else {}
    failure = ended.get("failure") or {}
    return {
        "conditions": _conditions(newest, ended, goes_on, runs=runs),
        "attempts": newest["attempt"],
        "restarts": newest["restarts"],
        "failure": {key: failure[key] for key in _OF_A_FAILURE if failure.get(key) is not None},
        "checkpoint": {"lastCommittedStep": newest["checkpoint"]["step"]} if newest.get("checkpoint") else {},
    }


def _conditions(newest: Object, end: Object, goes_on: str, *, runs: bool) -> list[Object]:
    """Conditions as the operator would have put them. `goes_on`: how it is started again."""
    state = str(end.get("state", ""))
    if state in ENDS:
        message = str(end.get("message", ""))
        summary = COMPLETE if state == State.COMPLETE.value else message
        return [_condition("Progressing", "False", state, summary), _condition(state, "True", state, message)]
    if runs:
        not_stopped = _condition("Suspended", "False", Reason.NOT_SUSPENDED.value, "no stop was requested")
        return [_condition("Progressing", "True", "Running", f"attempt {newest['attempt']} runs"), not_stopped]
    if newest.get("outcome") == "Stopped":
        message = f"stopped as asked; {goes_on}"
        return [_condition("Progressing", "False", "Suspended", message), _condition("Suspended", "True", "Suspended", message)]
    message = f"its process ended without a report; {goes_on}"
    return [_condition("Progressing", "Unknown", "NoReport", message), _condition("Suspended", "True", "NoReport", message)]


def _condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}
