"""`lockstep diff -f job.yaml`: what a job file would change of what is on a cluster. Reads only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from lockstep.cli.shared.difference import EXIT_DIFFERENT, print_comparison
from lockstep.cli.shared.inputs import ClusterOption, FilesOption, NamespaceOption, SetOption, read_all, resolve_inputs
from lockstep.cli.shared.jobargs import ContextOption
from lockstep.platforms.output import put, tell

if TYPE_CHECKING:
    from lockstep.cli.shared.inputs import Inputs


def diff(
    file: FilesOption,
    cluster: ClusterOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    changes: SetOption = None,
) -> None:
    """Compare job files with the jobs on the cluster.

    Exit code 0: nothing would change, 1: something would.

    Differences take effect when a job next starts from zero pods.

    Example: lockstep diff -f job.yaml
    """
    from lockstep.plan.ahead.live import compare

    jobs = [(inputs, resolve_inputs(inputs)) for inputs in read_all(file, cluster, namespace, changes, context=context)]
    differs = False
    for inputs, resolved in jobs:
        objects = asyncio.run(_observe(inputs.aim(), context))
        comparisons = [one for one in compare(resolved, objects) if one.differs]
        differs = differs or bool(comparisons)
        if len(jobs) > 1 and comparisons:
            put(f"{inputs.source}:")
        for comparison in comparisons:
            print_comparison(comparison)
    if differs:
        raise typer.Exit(EXIT_DIFFERENT)
    tell("nothing would change")


async def _observe(inputs: Inputs, context: str | None) -> list[dict[str, Any]]:
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.clusters.facts import objects_of

    async with await Cluster.connect(context) as connection:
        return await objects_of(connection, inputs.job.metadata.name, inputs.namespace)
