"""`lockstep logs JOB`: what a job's ranks print, while it runs and after its end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.shared.jobargs import JobArgument, TargetOptions, find_job, on_site
from lockstep.plan.pages.logs import LogSelection, RankFailures, error_lines, no_such_node, node_of_rank, parse_duration
from lockstep.platforms.output import put, say
from lockstep.platforms.places.common import show_to_its_end

if TYPE_CHECKING:
    from lockstep.platforms.places.backend import Job


@on_site
def logs(
    where: TargetOptions,
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only lines of this rank. Lockstep finds its node.")] = None,
    node: Annotated[
        int | None, typer.Option(min=0, help="The node whose log you read. Default: 0, whose log also says what happens to the job.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Print the first failure with its last lines, then the others.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Print only this many last lines.")] = None,
    since: Annotated[str | None, typer.Option(help="Only lines newer than this: 90s, 10m, 2h.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only lines of this attempt, from the job's volume.")] = None,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Print the attempt before the newest one.")] = False,
) -> None:
    """Print a job's log, while it runs and after its end.

    It prints node 0's log, another node's, or one rank's. While the job runs it comes from the pod, later from the volume.

    Exit code with --follow: 0 the job is complete, 1 it failed. Without: 1 if there is nothing to print.

    Example: lockstep logs demo --follow --rank 3
    """
    if rank is not None and node is not None:
        raise ConfigError("use either --rank or --node: a rank is on one node only")
    if previous and attempt is not None:
        raise ConfigError("use either --previous or --attempt")
    if follow and (errors or previous or attempt is not None):
        raise ConfigError(
            "--follow shows the attempt that runs and those to come: it can't be combined with --errors, --attempt and --previous"
        )
    since_seconds = None if since is None else parse_duration(since)
    found = find_job(job, where)
    selection = LogSelection(
        node=node or 0 if rank is None else node_of_rank(found.layout(), rank),
        rank=rank,
        tail=tail,
        since_seconds=since_seconds,
        attempt=_before(found) if previous else attempt,
    )
    try:
        shown = show_to_its_end if follow else _errors if errors else _print
        code = asyncio.run(shown(found, selection))
    except Failed:
        nodes = int(found.job["spec"].get("nodes") or 0)
        if selection.node >= nodes > 0:  # (one that it had before it was scaled has left its log)
            raise no_such_node(found.name, selection.node, nodes) from None
        raise
    raise typer.Exit(code)


async def _print(job: Job, selection: LogSelection) -> int:
    printed = selection.tail == 0
    async with aclosing(job.lines(selection, say)) as output:
        async for line in output:
            printed = True
            put(line)
    if not printed:
        raise Failed(f"node {selection.node} of job {job.name} has printed nothing that matches: lockstep why {job.at}")
    return 0


def _before(job: Job) -> int:
    attempts = int(job.status.get("attempts") or 0)
    if attempts < 2:
        raise ConfigError(f"job {job.name} has had {attempts or 'no'} attempt{'' if attempts == 1 else 's'}: there is no previous one")
    return attempts - 1


async def _errors(job: Job, selection: LogSelection) -> int:
    failures = RankFailures()
    async with aclosing(job.lines(replace(selection, node=0, rank=None, tail=None), say)) as output:
        async for line in output:
            failures.add(line)
    failure = {} if selection.attempt is not None else job.status.get("failure") or {}
    of_it = "" if selection.attempt is None else f" in attempt {selection.attempt}"
    put(*(list(error_lines(failure, failures.failures)) or [f"no rank of job {job.name} has failed{of_it}"]))
    return 0
