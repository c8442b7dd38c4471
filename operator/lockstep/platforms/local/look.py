"""A `--local` run as `lockstep top` shows it: from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.api.objects import condition
from lockstep.plan.pages.answers import read_summary
from lockstep.plan.pages.top import LOCAL, snapshot
from lockstep.plan.reconcile.goodput import percentage_of
from lockstep.platforms.inpod import runfolder
from lockstep.platforms.local.records import observed_run

SHOWN = ("loss", "stepSeconds", "tokensPerSecond", "mfu")


def look(job: str, workspace: Path, points: int) -> tuple[dict[str, Any], bool]:
    """The snapshot, and whether the run has ended. Raises ConfigError when there is none."""
    status = observed_run(job, workspace).status
    found = read_summary(runfolder.summary(str(workspace / "workspace/runs" / job), points=points))
    steps, run = found["steps"], found["run"]
    if steps:
        newest = list(steps)[-1]
        metrics = [{"name": name, "value": f"{steps[newest][name]:.5g}"} for name in SHOWN if name in steps[newest]]
        status["trainer"] = {"step": int(newest), "metrics": metrics}
    book = found["goodput"].get("goodput") or {}
    percentage = percentage_of(book.get("spent") or {}, book.get("furthestStep") or 0)
    if percentage is not None:
        status["goodput"] = {"percentage": percentage}
    counts = [run.get(name) for name in ("nodes", "ranksPerNode")]
    if all(isinstance(count, int) for count in counts):
        status["ranks"] = {"desired": counts[0] * counts[1]}
    observed = {"metadata": {"name": job, "namespace": LOCAL}, "spec": {}, "status": status}
    return snapshot(observed, (), {0: {"curve": steps}}), condition(status, "Progressing").get("reason") != "Running"
