"""Differences on a cluster, as `lockstep deploy --diff` prints them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from lockstep.cli.shared.terminal import waiting
from lockstep.plan.diff import shown
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.kube.aim import Connections
    from lockstep.plan.ahead.live import Comparison
    from lockstep.plan.diff import Change

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


async def _diff_deployment(objects: list[dict[str, Any]], connections: Connections) -> tuple[bool, int]:
    """Return True if anything would change, and how many objects could not be compared."""
    from lockstep.kube.cluster import ApiError, Cluster
    from lockstep.plan.ahead.live import Comparison
    from lockstep.plan.ship.deploy import called
    from lockstep.platforms.clusters.install import with_one_default
    from lockstep.platforms.clusters.send import would_change

    differs, unseen = False, 0
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
        for item, answer in zip(objects, answers, strict=True):
            if isinstance(answer, ApiError):
                put(f"? {called(item)}: {answer}")
                unseen += 1
                continue
            if answer is None or answer:
                print_comparison(Comparison(called(item), absent=answer is None, changes=tuple(answer or ())))
                differs = True
    return differs, unseen


def print_comparison(comparison: Comparison) -> None:
    """Print one object and each field that would change."""
    if comparison.foreign:
        put(f"! {comparison.name} is there and belongs to something else: the job can't start while it exists")
    elif not comparison.changes:
        put(f"+ {comparison.name}")
    else:
        put(f"~ {comparison.name}")
    for change in comparison.changes:
        put(f"    {change.path}: {shown(change.observed, LONGEST_VALUE)} → {shown(change.desired, LONGEST_VALUE)}")
