"""A failed `--local` run as its folder remembers it."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.plan.reconcile.clocks import Earlier


def failed_run(job: str, root: Path) -> Earlier:
    """The newest run of this name, which must have failed. Raises ConfigError."""
    folder = root / "workspace" / "runs" / job / "gang"
    try:
        newest = json.loads((folder / "attempts.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        end = json.loads(path.read_text(encoding="utf-8")) if (path := folder / "end.json").exists() else {}
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"no run {job} can be read in {folder} ({error}): say --workspace as `lockstep run --local` was told") from None
    state = end.get("state") if end.get("jobUid") == newest["jobUid"] else None
    if state == "Complete":
        raise ConfigError(f"run {job} in {folder.parent} is complete: there is nothing to retry")
    if state is None or end.get("retry", 0) < newest.get("retry", 0):
        raise ConfigError(f"run {job} in {folder.parent} has not failed: `lockstep run -f FILE --local` goes on from its last checkpoint")
    return Earlier(newest["jobUid"], end.get("retry", 0))
