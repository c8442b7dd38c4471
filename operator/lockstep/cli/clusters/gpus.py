"""`lockstep cluster gpus`: what nvidia-smi says in every pod of a job, by default of the dev environment; without pods, what nodes say of
themselves.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import DEV_ENVIRONMENT
from lockstep.cli.shared.jobargs import ContextOption, NamespaceOption, OptionalClusterArgument
from lockstep.platforms.output import put, tell

if TYPE_CHECKING:
    from lockstep.kube.cluster import Cluster

ASKED = ("index", "name", "memory.used", "memory.total", "utilization.gpu", "temperature.gpu", "driver_version")
COLUMNS = ("POD", "GPU", "NAME", "USED MiB", "TOTAL MiB", "LOAD %", "°C", "DRIVER")
NODE_COLUMNS = ("NODE", "GPUS", "NAME", "TOTAL MiB", "")
SECONDS = 30.0
GPUS_MAX = 64
"""Most GPUs of one node."""


def gpus(
    cluster: OptionalClusterArgument = "local",
    job: Annotated[str, typer.Option("--job", help="Job whose pods to ask.")] = DEV_ENVIRONMENT,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Show the GPUs of every pod of a job, by nvidia-smi.

    It shows name, memory, load, temperature and driver. Exit code 1: a pod has none, or doesn't answer.

    If no pod runs, it shows the nodes by their labels, which needs the right to list nodes.

    Example: lockstep cluster gpus barcelona
    """
    from lockstep.cli.shared.target import load

    file = load(cluster)
    if file.profile.spec.gpus.per_node == 0:
        put(f"cluster {file.cluster.name} has no GPUs (gpus.per_node is 0 in its file): ranks run on the CPU")
        return
    answers = asyncio.run(_ask(namespace or file.cluster.namespace, job, context, cluster))
    _show(answers)
    silent = [f"{pod}: {error}" for pod, error in answers.items() if isinstance(error, str)]
    if silent:
        raise Failed("; ".join(silent))


async def _ask(namespace: str, job: str, context: str | None, cluster: str) -> Mapping[str, list[list[str]] | str]:
    """pod → its GPUs' cells, or why there are none."""
    from lockstep.kube.cluster import Cluster
    from lockstep.kube.exec import PodPlace
    from lockstep.platforms.files.reader import running_pods
    from lockstep.programs import ProgramFailed, output_of

    async with await Cluster.connect(context) as connection:
        pods = await running_pods(connection, namespace, job)
        if not pods:
            none = (
                f"no pod of job {job} runs in namespace {namespace}: lockstep deploy {shlex.quote(cluster)} starts the dev environment,"
                " --job names another job"
            )
            _show_nodes(await _nodes(connection, none), none)
            return {}

        async def ask(place: PodPlace) -> list[list[str]] | str:
            command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]
            try:
                text = (await output_of(place, command, seconds=SECONDS)).decode(errors="replace")
            except ProgramFailed as error:
                return str(error)
            rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
            if any(len(cells) != len(ASKED) for cells in rows[:GPUS_MAX]):
                return f"nvidia-smi of pod {place.pod} says {text[:100]!r}, which is no table of GPUs"
            return rows[:GPUS_MAX]

        places = [place for _, place in sorted(pods.items())]
        return dict(zip([place.pod for place in places], await asyncio.gather(*map(ask, places)), strict=True))


async def _nodes(connection: Cluster, otherwise: str) -> list[Sequence[str]]:
    """A row for each node with GPUs: their number, and the labels of NVIDIA's discovery. Raises ConfigError, with `otherwise`, where none
    is seen.
    """
    from lockstep.plan.discovery.nodes import GPU_MEMORY, PRODUCT, labels, worth_saying
    from lockstep.plan.render.fabric import GPU_RESOURCE
    from lockstep.plan.waiting.nodes import allocatable
    from lockstep.platforms.clusters.listings import list_kind

    nodes = await list_kind(connection, "Node")
    if not nodes.seen:
        raise ConfigError(f"{otherwise}; you may not list nodes (403), so what they have is unknown without a pod")
    counted = [(node, int(allocatable(node, GPU_RESOURCE))) for node in nodes.items]
    rows: list[Sequence[str]] = [
        (str(node["metadata"]["name"]), str(gpus), labels(node).get(PRODUCT, "-"), labels(node).get(GPU_MEMORY, "-"), worth_saying(node))
        for node, gpus in counted
        if gpus
    ]
    if not rows:
        raise ConfigError(
            f"{otherwise}; and none of {len(nodes.items)} nodes has {GPU_RESOURCE}: the device plugin doesn't run, or there are no GPUs"
        )
    return rows


def _show_nodes(nodes: list[Sequence[str]], why: str) -> None:
    tell(f"lockstep: {why}. Until then, their labels show:")
    _print_table([NODE_COLUMNS, *nodes])


def _show(answers: Mapping[str, list[list[str]] | str]) -> None:
    rows = [(pod, *cells) for pod, gpus in answers.items() if not isinstance(gpus, str) for cells in gpus]
    if rows:
        _print_table([COLUMNS, *rows])


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    from lockstep.plan.pages.table import aligned

    for line in aligned(rows):
        put(line)
