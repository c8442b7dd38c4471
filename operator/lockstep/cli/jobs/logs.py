"""`lockstep logs JOB`: what a job's ranks print, while it runs and after its end."""

from __future__ import annotations

import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import Object
from lockstep.cli.shared.jobargs import WORKSPACE, JobArgument, LocalRunOption, TargetOptions, WorkspaceOption, find_job_or_run, on_cluster
from lockstep.cli.shared.terminal import say
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.jobs.logs import LogSelection

EXIT_FAILED = 1
POLL_SECONDS = 0.5


@on_cluster
def logs(
    where: TargetOptions,
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only lines of this rank, on whichever node it is.")] = None,
    node: Annotated[
        int | None, typer.Option(min=0, help="The node whose log is read. Default: 0, whose log also tells what happens.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The first failure with its last lines, then the others.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only this many last lines.")] = None,
    since: Annotated[str | None, typer.Option(help="Only lines newer than this: 90s, 10m, 2h.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only lines of this attempt, from the job's volume.")] = None,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="The attempt before the newest one.")] = False,
    local: LocalRunOption = False,
    workspace: WorkspaceOption = WORKSPACE,
) -> None:
    """Print a job's log: node 0's, another node's, or one rank's; from its pod while it runs, else from its volume.

    Exit code with --follow: 0 the job is complete, 1 it failed. Without: 1 if there is nothing to print.

    Example: lockstep logs demo --follow --rank 3
    """
    from lockstep.plan.pages.logs import parse_duration
    from lockstep.platforms.jobs.logs import LogSelection

    if rank is not None and node is not None:
        raise ConfigError("use either --rank or --node: a rank is on one node only")
    if previous and attempt is not None:
        raise ConfigError("use either --previous or --attempt")
    if follow and (errors or previous or attempt is not None):
        raise ConfigError(
            "--follow shows the attempt that runs and those to come: it can't be combined with --errors, --attempt and --previous"
        )
    selection = LogSelection(node or 0, rank, tail, None if since is None else parse_duration(since), attempt)
    if local:
        raise typer.Exit(_print_local(job, workspace, selection, follow=follow, errors=errors, previous=previous))
    cluster_job = find_job_or_run(job, where)
    raise typer.Exit(
        cluster_job.run(lambda cluster: _print(cluster, cluster_job.job, selection, follow=follow, errors=errors, previous=previous))
    )


async def _print(cluster: Cluster, job: Object, selection: LogSelection, *, follow: bool, errors: bool, previous: bool) -> int:
    from dataclasses import replace

    from lockstep.plan.pages.logs import node_of_rank, nodes_of
    from lockstep.platforms.jobs.logs import lines
    from lockstep.platforms.jobs.runs import frozen_run

    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    if previous:
        selection = replace(selection, attempt=_before(job))
    if selection.rank is not None:
        nodes = nodes_of(job) or int((await frozen_run(cluster, job)).get("nodes", 0))
        selection = replace(selection, node=node_of_rank(job.get("status", {}).get("ranks") or {}, nodes, selection.rank))
    if follow:
        return await _follow(cluster, job, selection)
    if errors:
        return await _print_errors(cluster, job, selection)
    printed = selection.tail == 0
    async with aclosing(lines(cluster, job, selection, say)) as output:
        async for line in output:
            printed = True
            put(line)
    if not printed:
        raise Failed(f"node {selection.node} of job {name} has printed nothing that matches: lockstep why {name} -n {namespace}")
    return 0


def _before(job: Object) -> int:
    attempts = int(job.get("status", {}).get("attempts") or 0)
    if attempts < 2:
        raise ConfigError(
            f"job {job['metadata']['name']} has had {attempts or 'no'} attempt{'' if attempts == 1 else 's'}: there is no previous one"
        )
    return attempts - 1


async def _print_errors(cluster: Cluster, job: Object, selection: LogSelection) -> int:
    from dataclasses import replace

    from lockstep.plan.pages.logs import RankFailures, error_lines
    from lockstep.platforms.jobs.logs import lines

    failures = RankFailures()
    async with aclosing(lines(cluster, job, replace(selection, node=0, rank=None, tail=None), say)) as output:
        async for line in output:
            failures.add(line)
    failure = {} if selection.attempt is not None else job.get("status", {}).get("failure") or {}
    of_it = "" if selection.attempt is None else f" in attempt {selection.attempt}"
    put(*(list(error_lines(failure, failures.failures)) or [f"no rank of job {job['metadata']['name']} has failed{of_it}"]))
    return 0


async def _follow(cluster: Cluster, job: Object, selection: LogSelection) -> int:
    from lockstep.api.objects import condition, has_ended, is_true
    from lockstep.platforms.jobs.logs import follow, has_run_ended, is_run, lines

    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    status, reason_shown = job.get("status", {}), ""

    async def over() -> bool:
        nonlocal status, reason_shown
        if is_run(job):
            return await has_run_ended(cluster, job)
        current = await cluster.get("TrainingJob", namespace, name)
        if current is None:
            raise Failed(f"job {name} was deleted")
        status = current.get("status", {})
        reason = str(condition(status, "Progressing").get("reason"))
        if reason == "Suspended" and reason_shown != reason:
            say(f"{name} is suspended; this goes on when it does (lockstep resume {name} -n {namespace}), Ctrl-C ends it")
        reason_shown = reason
        return has_ended(status)

    printed = False
    async for line in follow(cluster, namespace, name, selection, over):
        printed = True
        put(line, flush=True)
    if not printed:
        async with aclosing(lines(cluster, job, selection, say)) as output:
            async for line in output:
                put(line)
    return EXIT_FAILED if is_true(status, "Failed") else 0


def _print_local(job: str, workspace: Path, selection: LogSelection, *, follow: bool, errors: bool, previous: bool) -> int:
    """Print the logs of a run on this machine, and return the exit code. Raises ConfigError when there is no such run."""
    from dataclasses import replace

    from lockstep.plan.pages.logs import error_lines, rank_failures
    from lockstep.platforms.inpod import runfolder
    from lockstep.platforms.jobs.logs import request_of
    from lockstep.platforms.local.records import observed_run

    status = observed_run(job, workspace).status
    root = str(workspace / "workspace/runs" / job)
    if previous:
        selection = replace(selection, attempt=_attempt_before_newest(job, root))
    if selection.rank is not None:
        selection = replace(selection, node=_node_of(root, selection.rank))
    if errors:
        failed = rank_failures(runfolder.log(**{**request_of(replace(selection, node=0, rank=None, tail=None)), "root": root}))
        failure = status.get("failure") or {} if selection.attempt is None else {}
        put(*(list(error_lines(failure, failed)) or [f"no rank of run {job} has failed"]))
        return 0
    return _follow_folder(job, workspace, {**request_of(selection), "root": root}, follow=follow)


def _attempt_before_newest(job: str, root: str) -> int:
    from lockstep.platforms.inpod import runfolder

    attempts = runfolder.summary(root, points=1)["attempts"]
    own = [int(record["attempt"]) for record in attempts if record.get("jobUid") == attempts[-1].get("jobUid")]
    if len(own) < 2:
        raise ConfigError(f"run {job} has had one attempt: there is no previous one")
    return own[-2]


def _node_of(root: str, rank: int) -> int:
    from lockstep.plan.pages.logs import node_of_rank, ranks_of_run
    from lockstep.platforms.inpod import runfolder

    run = runfolder.summary(root, points=1)["run"]
    return node_of_rank(ranks_of_run(run), int(run.get("nodes", 0)), rank)


def _follow_folder(job: str, workspace: Path, request: Object, *, follow: bool) -> int:
    """Print what there is, then with `follow` what is new, until no process of the run is there."""
    from lockstep.api.objects import condition, is_true
    from lockstep.platforms.inpod import runfolder
    from lockstep.platforms.local.records import observed_run

    printed: int | None = None
    while True:
        status = observed_run(job, workspace).status  # before the look at the lines: the last ones are there when it has ended
        output = list(runfolder.log(**{**request, "tail": -1}))
        first = 0 if request["tail"] < 0 else max(0, len(output) - request["tail"])
        for line in output[first if printed is None else printed :]:
            put(line, flush=True)
        printed = len(output)
        if not follow and not output:
            raise Failed(f"run {job} has printed nothing that matches: its logs are in {request['root']}/{runfolder.OUTPUT}")
        if not follow:
            return 0
        if condition(status, "Progressing").get("reason") != "Running":
            return EXIT_FAILED if is_true(status, "Failed") else 0
        time.sleep(POLL_SECONDS)
