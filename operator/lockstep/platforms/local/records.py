"""Records in the folder of a `--local` run: as a job's status, as a page of `lockstep top`, and as a run to retry."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object, condition
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.clocks import Earlier

if TYPE_CHECKING:
    from lockstep.platforms.inpod.runfolder import Watch

FIRST_SECONDS = 1.0
"""Seconds before the first measurement, so that it has rates."""
METRICS_SHOWN = ("loss", "stepSeconds", "tokensPerSecond", "mfu")
_OF_A_FAILURE = ("rank", "node", "exitCode", "signal", "exception", "cause", "step", "message", "lastLines")


def observed_run(job: str, root: Path) -> Observed:
    """Return the newest run of this name. Raises ConfigError when there is none, or its records can't be read."""
    folder = root / "workspace" / "runs" / job
    with _readable(job, folder) as (attempts, end):
        status = _status(attempts, end, runs=_runs(folder / "local.lock"))
    return Observed(job={"metadata": {"name": job, "namespace": "local", "uid": "local"}, "spec": {}, "status": status})


def run_names(root: Path) -> list[str]:
    """Names of the runs in a workspace whose records are there, by name."""
    return sorted(path.parent.parent.name for path in (root / "workspace" / "runs").glob("*/gang/attempts.jsonl"))


def process_of(folder: Path) -> int | None:
    """Return the pid of the process that runs it now; None: none does."""
    lock = folder / "local.lock"
    if not _runs(lock):
        return None
    text = lock.read_text(encoding="utf-8", errors="replace").strip()
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
        raise ConfigError(f"run {job} in {folder} has not failed: `lockstep run -f FILE --local` goes on from its last checkpoint")
    return Earlier(uid, end.get("retry", 0))


@contextlib.contextmanager
def _readable(job: str, run: Path) -> Iterator[tuple[list[Object], Object]]:
    """Records of all attempts, and of the end. Raises ConfigError for what can't be read, in the block, too: scripts can write there."""
    folder = run / "gang"
    try:
        attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text(encoding="utf-8").splitlines()]
        yield attempts, json.loads(path.read_text(encoding="utf-8")) if (path := folder / "end.json").exists() else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"no run {job} can be read in {folder} ({error}): use the same --workspace as for `lockstep run --local`"
        ) from None


class LocalLooks:
    """Repeated looks at a run of this machine, and at its ranks while it runs."""

    def __init__(self, job: str, root: Path) -> None:
        self._job, self._root = job, root
        self._folder = str(root.resolve() / "workspace/runs" / job)
        self._watch: Watch | None = None

    def look(self, points: int) -> tuple[dict[str, Any], bool]:
        """Return the snapshot that `lockstep top` shows, and whether the run has ended. The first look takes a second longer, for rates.

        Raises ConfigError when there is no such run.
        """
        from lockstep.plan.pages.answers import read_node
        from lockstep.plan.pages.top import machine_node
        from lockstep.platforms.inpod.runfolder import Watch

        page, over = _snapshot_of(self._job, self._root, points)
        if over:
            return page, over
        if self._watch is None:
            self._watch = Watch(self._folder, 0, machine=True)
            time.sleep(FIRST_SECONDS)
        ranks = range(page.get("ranks", {}).get("desired", 0))
        return {**page, "nodes": [machine_node(socket.gethostname(), ranks, read_node(self._watch.answer()))]}, over


def _snapshot_of(job: str, workspace: Path, points: int) -> tuple[dict[str, Any], bool]:
    """Return the snapshot that `lockstep top` shows, and whether the run has ended. Raises ConfigError when there is none."""
    from lockstep.plan.pages.answers import read_summary
    from lockstep.plan.pages.logs import ranks_of_run
    from lockstep.plan.pages.top import LOCAL, snapshot
    from lockstep.plan.reconcile.measures import percentage_of
    from lockstep.platforms.inpod import runfolder

    status = observed_run(job, workspace).status
    summary = read_summary(runfolder.summary(str(workspace / "workspace/runs" / job), points=points))
    steps, run = summary["steps"], summary["run"]
    if steps:
        newest = list(steps)[-1]
        metrics = [{"name": name, "value": f"{steps[newest][name]:.5g}"} for name in METRICS_SHOWN if name in steps[newest]]
        status["trainer"] = {"step": int(newest), "metrics": metrics}
    book = summary["goodput"].get("goodput") or {}
    percentage = percentage_of(book.get("spent") or {}, book.get("furthestStep") or 0)
    if percentage is not None:
        status["goodput"] = {"percentage": percentage}
    ranks = ranks_of_run(run)
    if ranks:
        status["ranks"] = ranks
    observed = {"metadata": {"name": job, "namespace": LOCAL}, "spec": {}, "status": status}
    return snapshot(observed, (), {0: {"curve": steps}}), condition(status, "Progressing").get("reason") != "Running"


def _runs(lock: Path) -> bool:
    """Return True if a process of it is there: it holds the lock as long as it lives."""
    try:
        with lock.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _status(attempts: list[Object], end: Object, *, runs: bool) -> Object:
    newest = attempts[-1]
    own = [record for record in attempts if record["jobUid"] == newest["jobUid"]]
    ended = end if end.get("jobUid") == newest["jobUid"] else {}
    restarts = [record["restart"] for record in own if record.get("restart")]
    failure = ended.get("failure") or (restarts[-1]["failure"] if restarts else {})
    return {
        "conditions": _conditions(newest, ended, runs=runs),
        "attempts": newest["attempt"],
        "restarts": newest["restarts"],
        "failure": {key: failure[key] for key in _OF_A_FAILURE if failure.get(key) is not None},
        "restartHistory": [_cost(restart) for restart in restarts[-10:]],
        "checkpoint": {"lastCommittedStep": newest["checkpoint"]["step"]} if newest.get("checkpoint") else {},
    }


def _cost(restart: Object) -> Object:
    cause = (restart["failure"].get("cause")) or "Internal"
    down = restart.get("downtimeSeconds")
    return {"cause": cause, "lostSteps": restart["lostSteps"], **({} if down is None else {"downtimeSeconds": down})}


def _conditions(newest: Object, end: Object, *, runs: bool) -> list[Object]:
    """Conditions as the operator would have put them."""
    state = str(end.get("state", ""))
    if state:
        message = str(end.get("message", ""))
        return [_condition("Progressing", "False", state, message), _condition(state, "True", state, message)]
    if runs:
        return [_condition("Progressing", "True", "Running", f"attempt {newest['attempt']} runs")]
    if newest.get("outcome") == "Stopped":
        return [_condition("Progressing", "False", "Suspended", "stopped as asked; it goes on from its last commit")]
    return [_condition("Progressing", "Unknown", "NoReport", "its process is gone without a word; it goes on from its last commit")]


def _condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}
