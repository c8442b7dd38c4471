"""A `--local` run as `lockstep top` shows it: from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.plan.readstatus import condition
from lockstep.plan.top import snapshot
from lockstep.platforms import runfolder
from lockstep.platforms.local.records import observed_run

SHOWN = ("loss", "stepSeconds", "tokensPerSecond", "mfu")
_USEFUL, _NO_PODS = ("train", "evaluate"), ("queued", "stopped")


def look(job: str, workspace: Path, points: int) -> tuple[dict[str, Any], bool]:
    """The snapshot, and whether the run has ended. Raises ConfigError when there is none."""
    status = observed_run(job, workspace).status
    found = runfolder.summary(str(workspace / "workspace/runs" / job), points=points)
    steps, run = found["steps"], found["run"]
    if steps:
        newest = list(steps)[-1]
        metrics = [{"name": name, "value": f"{steps[newest][name]:.5g}"} for name in SHOWN if name in steps[newest]]
        status["trainer"] = {"step": int(newest), "metrics": metrics}
    if (goodput := percentage(found["goodput"])) is not None:
        status["goodput"] = {"percentage": goodput}
    if run:
        status["ranks"] = {"desired": run["nodes"] * run["ranksPerNode"]}
    observed = {"metadata": {"name": job, "namespace": "local"}, "spec": {}, "status": status}
    return snapshot(observed, (), {0: {"curve": steps}}), condition(status, "Progressing").get("reason") != "Running"


def percentage(record: dict[str, Any]) -> int | None:
    """Goodput of an account of the run's folder, as status has it; None: there is no account."""
    spent: dict[str, int] = (record.get("goodput") or {}).get("spent") or {}
    held = sum(spent.values()) - sum(spent.get(kind, 0) for kind in _NO_PODS)
    return min(100, 100 * sum(spent.get(kind, 0) for kind in _USEFUL) // held) if held > 0 else None
