"""A run's folder and its nodes, read by `runfolder.py` in a pod, which ends when nobody asks any more."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lockstep.api.names import RUN_KEY
from lockstep.kube.cluster import Cluster
from lockstep.kube.exec import Place, Program, answer_of, lines_in, python_program
from lockstep.plan.pages.answers import read_summary
from lockstep.platforms.files.results import run_folder
from lockstep.platforms.inpod import runfolder, source_of


async def frozen_run(cluster: Cluster, job: dict[str, Any]) -> dict[str, Any]:
    """run.json of the job's newest start, as the cluster keeps it; {} when there is none any more, or none yet."""
    name = (job.get("status", {}).get("run") or {}).get("name")
    config_map = await cluster.get("ConfigMap", job["metadata"]["namespace"], name) if name else None
    try:
        run = {} if config_map is None else json.loads(config_map["data"][RUN_KEY])
    except (ValueError, KeyError, TypeError, RecursionError):  # (whoever may write ConfigMaps may have written anything)
        return {}
    return run if isinstance(run, dict) else {}


@asynccontextmanager
async def runfolder_program(cluster: Cluster, place: Place, **request: Any) -> AsyncIterator[Program]:
    """Start the program with its request."""
    async with python_program(cluster, place, source_of(runfolder), json.dumps(request)) as running:
        yield running


async def lines_of(running: Program) -> AsyncIterator[str]:
    """Yield its output line by line. Raises ProgramFailed when it ended with an error."""
    async for line in lines_in(running):
        yield line.decode(errors="replace")
    if running.code != 0:
        raise running.failure()


async def log_lines(cluster: Cluster, place: Place, job: str, **request: Any) -> AsyncGenerator[str, None]:
    """Yield lines of a node's log on the job's volume; `request` as `runfolder.log` takes it."""
    async with runfolder_program(cluster, place, what="log", root=run_folder(job), **request) as running:
        async for line in lines_of(running):
            yield line


async def summary(cluster: Cluster, place: Place, job: str, points: int = 1000) -> dict[str, Any]:
    """Measurements of the run, as `runfolder.summary` prints them."""
    text = ""
    async with runfolder_program(cluster, place, what="summary", root=run_folder(job), points=points) as running:
        async for line in lines_of(running):
            text = line
    return read_summary(answer_of(text, f"pod {place.pod}"))
