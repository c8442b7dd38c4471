"""`lockstep diff -f job.yaml`: what a job file would change of what is on a cluster. Reads only."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.inputs import ClusterOption, FilesOption, NamespaceOption, SetOption, read_all, resolve_inputs
from lockstep.cli.progress import waiting
from lockstep.platforms.output import put, tell

if TYPE_CHECKING:
    from lockstep.cli.inputs import Inputs
    from lockstep.plan.diff import Change
    from lockstep.plan.live import Comparison

ContextOption = Annotated[str | None, typer.Option("--context", help="The kubeconfig's context. Default: the current one.")]
EXIT_DIFFERENT = 1
AT_ONCE = 8  # objects that the API server is asked about
LONGEST_VALUE = 120  # characters of a value that are shown


def diff(
    file: FilesOption,
    cluster: ClusterOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    changes: SetOption = None,
) -> None:
    """Compare job files with the jobs that are on the cluster. Exit code 0: nothing would change, 1: something would.

    What differs takes effect when a job next starts from zero pods.

    Example: lockstep diff -f job.yaml
    """
    from lockstep.plan.live import compare

    jobs = [(inputs, resolve_inputs(inputs)) for inputs in read_all(file, cluster, namespace, changes)]
    differs = False
    for inputs, resolved in jobs:
        seen = asyncio.run(_observe(inputs.aim(), context))
        comparisons = [found for found in compare(resolved, seen) if found.differs]
        differs = differs or bool(comparisons)
        if len(jobs) > 1 and comparisons:
            put(f"{inputs.source}:")
        for comparison in comparisons:
            _print(comparison)
    if differs:
        raise typer.Exit(EXIT_DIFFERENT)
    tell("nothing would change")


async def _observe(inputs: Inputs, context: str | None) -> list[dict[str, Any]]:
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.surroundings import objects_of

    async with await Cluster.connect(context) as connection:
        return await objects_of(connection, inputs.job.metadata.name, inputs.namespace)


def diff_deployment(objects: list[dict[str, Any]], context: str | None) -> None:
    """What a deployment would change, by the API server's own dry run; what one may only read is compared field by field."""
    differs, unseen = asyncio.run(_diff_deployment(objects, context))
    if differs:
        raise typer.Exit(EXIT_DIFFERENT)
    there = len(objects) - unseen
    put(
        f"nothing would change: {f'all {there}' if not unseen else f'{there} of {len(objects)}'} objects are as the deployment would send them"
    )


async def _diff_deployment(objects: list[dict[str, Any]], context: str | None) -> tuple[bool, int]:
    """Whether anything would change, and how many objects could not be compared."""
    from lockstep.plan.deploy import called
    from lockstep.plan.live import Comparison
    from lockstep.platforms.kubernetes.cluster import ApiError, Cluster
    from lockstep.platforms.kubernetes.dryrun import would_change
    from lockstep.platforms.kubernetes.install import with_one_default

    differs, unseen = False, 0
    async with await Cluster.connect(context) as connection:
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
        for item, found in zip(objects, answers, strict=True):
            if isinstance(found, ApiError):
                put(f"? {called(item)}: {found}")
                unseen += 1
                continue
            if found is None or found:
                _print(Comparison(called(item), absent=found is None, changes=tuple(found or ())))
                differs = True
    return differs, unseen


def _print(comparison: Comparison) -> None:
    if comparison.foreign:
        put(f"! {comparison.name} is there and belongs to something else: the job can't start while it is")
    elif not comparison.changes:
        put(f"+ {comparison.name}")
    else:
        put(f"~ {comparison.name}")
    for change in comparison.changes:
        put(f"    {change.path}: {_shown(change.observed)} → {_shown(change.desired)}")


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, (str, int, list, dict, type(None))) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
