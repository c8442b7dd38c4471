"""What the folder of a `--local` run remembers, in the form of a job's status."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object
from lockstep.plan.observed import Observed

_OF_A_FAILURE = ("rank", "node", "exitCode", "signal", "exception", "cause", "step", "message", "lastLines")


def observed_run(job: str, root: Path) -> Observed:
    """The newest run of this name. Raises ConfigError when there is none, or its records can't be read."""
    folder = root / "workspace" / "runs" / job / "gang"
    try:
        attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text(encoding="utf-8").splitlines()]
        end = json.loads(path.read_text(encoding="utf-8")) if (path := folder / "end.json").exists() else {}
        status = _status(attempts, end, runs=_runs(folder.parent / "local.lock"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # (scripts can write there, too)
        raise ConfigError(f"no run {job} can be read in {folder} ({error}): say --workspace as `lockstep run --local` was told") from None
    return Observed(job={"metadata": {"name": job, "namespace": "local", "uid": "local"}, "spec": {}, "status": status})


def _runs(lock: Path) -> bool:
    """Whether a process of it is there: it holds the lock as long as it lives."""
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
    """As the operator would have put it."""
    state = str(end.get("state", ""))
    if state:
        said = str(end.get("message", ""))
        return [_condition("Progressing", "False", state, said), _condition(state, "True", state, said)]
    if runs:
        return [_condition("Progressing", "True", "Running", f"attempt {newest['attempt']} runs")]
    if newest.get("outcome") == "Stopped":
        return [_condition("Progressing", "False", "Suspended", "stopped as asked; it goes on from its last commit")]
    return [_condition("Progressing", "Unknown", "NoReport", "its process is gone without a word; it goes on from its last commit")]


def _condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}
