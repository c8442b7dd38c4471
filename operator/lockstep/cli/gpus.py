"""`lockstep cluster gpus`: what nvidia-smi says in every pod of a job, by default of the dev environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import DEV_ENVIRONMENT
from lockstep.cli.jobargs import ContextOption, NamespaceOption

ASKED = ("index", "name", "memory.used", "memory.total", "utilization.gpu", "temperature.gpu", "driver_version")
COLUMNS = ("POD", "GPU", "NAME", "USED MiB", "TOTAL MiB", "LOAD %", "°C", "DRIVER")
SECONDS = 30.0


def gpus(
    cluster: Annotated[str, typer.Argument(help="A cluster of clusters/, or a cluster file's path.")] = "local",
    job: Annotated[str, typer.Option("--job", help="The job whose pods are asked.")] = DEV_ENVIRONMENT,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Show the GPUs of every pod of a job: name, memory, load, temperature, driver. Exit code 1: a pod has none, or can't say.

    Example: lockstep cluster gpus barcelona
    """
    from lockstep.cli.target import load, use_embedded_cluster

    found = load(cluster)
    if found.profile.spec.gpus.per_node == 0:
        print(f"cluster {found.cluster.name} has no GPUs (gpus.per_node is 0 in its file): ranks run on the CPU")
        return
    use_embedded_cluster(found.cluster.name, context)
    said = asyncio.run(_ask(namespace or found.cluster.namespace, job, context, cluster))
    _show(said)
    silent = [f"{pod}: {error}" for pod, error in said.items() if isinstance(error, str)]
    if silent:
        raise Failed("; ".join(silent))


async def _ask(namespace: str, job: str, context: str | None, cluster: str) -> Mapping[str, list[list[str]] | str]:
    """pod → its GPUs' cells, or why there are none."""
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.exec import Place, ProgramFailed, output_of
    from lockstep.platforms.kubernetes.reader import running_pods

    async with await Cluster.connect(context) as connection:
        pods = await running_pods(connection, namespace, job)
        if not pods:
            raise ConfigError(
                f"no pod of job {job} runs in namespace {namespace}: lockstep deploy {cluster} starts the dev environment, --job names another job"
            )

        async def ask(place: Place) -> list[list[str]] | str:
            command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]
            try:
                text = (await output_of(connection, place, command, seconds=SECONDS)).decode(errors="replace")
            except ProgramFailed as error:
                return str(error)
            return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]

        places = [place for _, place in sorted(pods.items())]
        return dict(zip([place.pod for place in places], await asyncio.gather(*map(ask, places)), strict=True))


def _show(said: Mapping[str, list[list[str]] | str]) -> None:
    rows = [(pod, *cells) for pod, gpus in said.items() if not isinstance(gpus, str) for cells in gpus]
    widths = [max(len(row[number]) for row in [COLUMNS, *rows]) for number in range(len(COLUMNS))]
    for row in [COLUMNS, *rows] if rows else []:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
