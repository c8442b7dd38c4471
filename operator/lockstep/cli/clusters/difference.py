"""Differences on a cluster and of its jobs' next starts, as `lockstep deploy --diff` prints them, and losses, for which `lockstep deploy`
refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from lockstep.api.errors import Failed
from lockstep.cli.shared.terminal import Progress, waiting
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.ahead.live import Comparison
from lockstep.plan.diff import Change, shown
from lockstep.plan.ship.deploy import called, shown_lines
from lockstep.platforms.clusters.install import with_one_default
from lockstep.platforms.clusters.send import losses, next_starts, would_change
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.kube.aim import Connections
    from lockstep.plan.layers import Notice

EXIT_DIFFERENT = 1
AT_ONCE = 8  # objects that the API server is asked about
LONGEST_VALUE = 120  # characters of a value that are shown


def diff_deployment(objects: list[dict[str, Any]], connections: Connections) -> None:
    """Print what a deployment would change, by the API server's own dry run; what one may only read is compared field by field."""
    differs, unseen = asyncio.run(_diff_deployment(objects, connections))
    if differs:
        raise typer.Exit(EXIT_DIFFERENT)
    compared = len(objects) - unseen
    put(
        f"nothing would change: {f'all {compared}' if not unseen else f'{compared} of {len(objects)}'} objects are as the deployment would"
        " send them"
    )


async def refuse_losses(connection: Cluster, objects: list[dict[str, Any]], progress: Progress, *, force: bool) -> None:
    """Raise Failed if stored objects would lose fields to the CRDs in `objects`; with `force`, only say so."""
    lines, unseen = await losses(connection, objects)
    for kind in unseen:
        progress.done("not seen", f"{kind} objects of namespaces that you may not list: they may lose fields to these CRDs")
    if lines and not force:
        raise Failed(
            "stored objects have fields that this version's CRDs don't have, and nothing was sent:",
            *(f"  {line}" for line in shown_lines(lines)),
            "Deploy a version that has these fields, or let these jobs end and delete them. With --force the fields are lost.",
        )
    for line in shown_lines(lines):
        progress.done("losing", line)


async def _diff_deployment(objects: list[dict[str, Any]], connections: Connections) -> tuple[bool, int]:
    """Return True if anything would change, and how many objects could not be compared."""
    async with await Cluster.connect(connections) as connection:
        at_once = asyncio.Semaphore(AT_ONCE)

        async def changes(item: dict[str, Any]) -> list[Change] | ApiError | None:
            try:
                async with at_once:
                    return await would_change(connection, item)
            except ApiError as error:
                return error

        with waiting(f"asking the API server what would change in {len(objects)} objects"):
            objects = await with_one_default(connection, objects, lambda line: None)
            answers = await asyncio.gather(*map(changes, objects))
            refused = [isinstance(answer, ApiError) for answer in answers]
            differs = any(answer != [] for answer, is_refused in zip(answers, refused, strict=True) if not is_refused)
            lines, _ = await losses(connection, objects)
            starts, sees_jobs = await next_starts(connection, objects) if differs and not lines else ([], True)
        for item, answer in zip(objects, answers, strict=True):
            if isinstance(answer, ApiError):
                put(f"? {called(item)}: {answer}")
            elif answer is None or answer:
                print_comparison(Comparison(called(item), absent=answer is None, changes=tuple(answer or ())))
        for line in shown_lines(lines):
            put(f"! {line}")
        print_next_starts(starts)
        if not sees_jobs:
            put("? next starts of jobs in namespaces that you may not list")
    return differs, sum(refused)


def print_next_starts(starts: Iterable[tuple[dict[str, Any], tuple[Change, ...] | Notice]]) -> None:
    """Print what would differ at the next start of stored jobs, once for all jobs of the same changes, and which would not be accepted."""
    jobs_by_lines: dict[tuple[str, ...], list[str]] = {}
    for job, start in starts:
        lines = tuple(map(_shown_change, start)) if isinstance(start, tuple) else (f"    ! not accepted any more: {start.message}",)
        jobs_by_lines.setdefault(lines, []).append(called(job))
    for lines, jobs in jobs_by_lines.items():
        put(f"~ at the next start of {', '.join(shown_lines(jobs))}", *lines)


def print_comparison(comparison: Comparison) -> None:
    """Print one object and each field that would change."""
    if comparison.foreign:
        put(f"! {comparison.name} is there and belongs to something else: the job can't start while it exists")
    elif not comparison.changes:
        put(f"+ {comparison.name}")
    else:
        put(f"~ {comparison.name}")
    for change in comparison.changes:
        put(_shown_change(change))


def _shown_change(change: Change) -> str:
    return f"    {change.path}: {shown(change.observed, LONGEST_VALUE)} → {shown(change.desired, LONGEST_VALUE)}"
