"""`lockstep logs JOB --local`: from the folder of a run on this machine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import Object, condition, is_true
from lockstep.plan.pages.logs import error_lines, node_of_rank, rank_failures
from lockstep.platforms.inpod import runfolder
from lockstep.platforms.local.records import observed_run
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.platforms.jobs.logs import LogSelection

POLL_SECONDS = 0.5
EXIT_FAILED = 1


def print_local(job: str, workspace: Path, wanted: LogSelection, *, follow: bool, errors: bool, previous: bool) -> int:
    """The exit code. Raises ConfigError when there is no such run."""
    from lockstep.platforms.jobs.logs import request_of

    status = observed_run(job, workspace).status
    root = str(workspace / "workspace/runs" / job)
    if previous:
        wanted = replace(wanted, attempt=_before(job, root))
    if wanted.rank is not None:
        wanted = replace(wanted, node=_node_of(root, wanted.rank))
    if errors:
        found = rank_failures(runfolder.log(**{**request_of(replace(wanted, node=0, rank=None, tail=None)), "root": root}))
        failure = status.get("failure") or {} if wanted.attempt is None else {}
        put(*(list(error_lines(failure, found)) or [f"no rank of run {job} has failed"]))
        return 0
    return _print(job, workspace, {**request_of(wanted), "root": root}, follow=follow)


def _before(job: str, root: str) -> int:
    attempts = runfolder.summary(root, points=1)["attempts"]
    own = [int(record["attempt"]) for record in attempts if record.get("jobUid") == attempts[-1].get("jobUid")]
    if len(own) < 2:
        raise ConfigError(f"run {job} has had one attempt: there is no previous one")
    return own[-2]


def _node_of(root: str, rank: int) -> int:
    run = runfolder.summary(root, points=1)["run"]
    nodes = int(run.get("nodes", 0))
    return node_of_rank({"desired": nodes * int(run.get("ranksPerNode", 0))}, nodes, rank)


def _print(job: str, workspace: Path, request: Object, *, follow: bool) -> int:
    """What there is, then with `follow` what is new, until no process of the run is there."""
    known: int | None = None
    while True:
        status = observed_run(job, workspace).status  # before the look at the lines: the last ones are there when it has ended
        found = list(runfolder.log(**{**request, "tail": -1}))
        first = 0 if request["tail"] < 0 else max(0, len(found) - request["tail"])
        for line in found[first if known is None else known :]:
            put(line, flush=True)
        known = len(found)
        if not follow and not found:
            raise Failed(f"run {job} has printed nothing that was asked for: its logs are in {request['root']}/{runfolder.OUTPUT}")
        if not follow:
            return 0
        if condition(status, "Progressing").get("reason") != "Running":
            return EXIT_FAILED if is_true(status, "Failed") else 0
        time.sleep(POLL_SECONDS)
