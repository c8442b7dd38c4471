"""`lockstep cp SRC DST`: copy files between this machine and a job's volumes."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.files.copies import Copy, read_all, tell_result, there
from lockstep.cli.shared.inputs import only
from lockstep.cli.shared.jobargs import TargetOptions, on_cluster
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.cli.shared.terminal import Meter
from lockstep.platforms.kubernetes.backend import unknown_job
from lockstep.platforms.output import tell

if TYPE_CHECKING:
    from lockstep.kube.aim import Connections
    from lockstep.kube.cluster import Cluster
    from lockstep.kube.exec import PodPlace
    from lockstep.plan.render.resolved import Resolved
    from lockstep.platforms.files.transfer import Carried, Sender, TransferProgress
    from lockstep.platforms.hosts.backend import HostsBackend


@on_cluster
def cp(
    where: TargetOptions,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC...", help="Files or folders: of this machine, or JOB:/path on a job's volumes.", show_default=False),
    ],
    target: Annotated[
        str, typer.Argument(help="The target: JOB:/path, or a path of this machine. With a / at the end it is a folder to copy into.")
    ],
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="The job file of a job that has never started. It says which volumes the job will have.",
            show_default=False,
        ),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(
            "--node",
            min=0,
            help="The node whose volume is used. Default: every node's when copying to a job, node 0's when copying from it.",
        ),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="HOST",
            help="On hosts: the host that has SRC, and sends it to all others. This machine sends nothing.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that were sent from another folder.")] = False,
) -> None:
    """Copy files to or from a job's volumes.

    You can resume a copy. Every file is verified by SHA-256, and arrives whole or not at all.

    The target is the new name. With a / at its end it is a folder to copy into; `SRC/.` means the content of a folder. If a copy breaks,
    run the same command again to continue.

    A file that was sent from another folder, and differs, is not replaced without --force.

    If every pod has its own volumes, files go to all of them at once. If the job has no pods, a short-lived pod without GPUs mounts the
    volumes. On hosts (--cluster names a file of hosts) files go to the first host, and from host to host; this works before the job's
    first start, too.

    Example: lockstep cp models/llama demo:/datasets/models/

    Example: lockstep cp train.py config.json src/. demo:/workspace/

    Example: lockstep cp -f job.yaml train.py mine:
    """
    file = only(files, "cp") if files else None
    copies = read_all(sources, target) if origin is None else there(sources, target)
    if force and not copies[0].up:
        raise ConfigError("--force replaces files of a job, and these are copied from it: leave it out")
    backend = _hosts(file, where)
    if backend is None and origin is not None:
        raise ConfigError("--from names a host, which only a cluster file with platform: hosts has: name that file with --cluster")
    if backend is not None:
        from lockstep.cli.files.cphosts import copy_on_hosts

        with exiting_on_ctrl_c("interrupted: what has arrived is kept; run the same command again to continue"):
            done = [asyncio.run(copy_on_hosts(copy, backend, node, origin, force=force)) for copy in copies]
        raise typer.Exit(0 if all(done) else 1)
    before = None if file is None else _before_start(file, copies, where)
    place = before.namespace if before is not None else where.chosen_namespace()
    with exiting_on_ctrl_c("interrupted: what has arrived is kept; run the same command again to continue"):
        done = [asyncio.run(_copy(copy, place, where.connections, node, before, force=force)) for copy in copies]
    if not all(done):
        raise typer.Exit(1)


def _hosts(file: Path | None, where: TargetOptions) -> HostsBackend | None:
    """Return the hosts that are meant; None for a Kubernetes cluster."""
    from lockstep.platforms.hosts.backend import HostsBackend

    if file is None:
        backend = where.backend()
        return backend if isinstance(backend, HostsBackend) else None
    from lockstep.cli.shared.inputs import read_inputs

    inputs = read_inputs(file, where)
    return None if inputs.cluster.hosts is None else HostsBackend(inputs.cluster, where.cluster or inputs.cluster.cluster.name)


def _before_start(file: Path, copies: Sequence[Copy], where: TargetOptions) -> Resolved:
    """Resolve a job from its file: it may never have started. Raises ConfigError."""
    from lockstep.cli.shared.inputs import read_inputs, resolve_inputs

    inputs = read_inputs(file, where)
    inputs.aim(where.verb)
    resolved = resolve_inputs(inputs)
    for copy in copies:
        if copy.remote.job != resolved.name:
            raise ConfigError(
                f"{file} is job {resolved.name}, and not {copy.remote.job}: lockstep cp -f {shlex.quote(str(file))} SRC {resolved.name}:"
            )
    return resolved


async def _copy(copy: Copy, namespace: str, connections: Connections, node: int | None, before: Resolved | None, *, force: bool) -> bool:
    """Copy, and return True if everything arrived. `before`: the job as its file describes it, if it may never have started."""
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.files.reader import beside, nodes_with_volumes

    name = copy.remote.job
    sender = copy.sender(None, force=force) if copy.up else None
    async with await Cluster.connect(connections) as cluster:
        if before is not None and await cluster.get("StatefulSet", namespace, name) is None:
            return await _copy_before_start(cluster, copy, before, node, sender)
        await known_job(cluster, namespace, name, f"; before its first start: lockstep cp -f FILE SRC {name}:")
        volumes = await nodes_with_volumes(cluster, namespace, name)
        if node is not None and node not in volumes and volumes != [0]:
            raise ConfigError(f"job {name} has no volume of node {node}: it has those of {', '.join(map(str, volumes))}")
        return await _copy_to(copy, volumes, node, lambda number: beside(cluster, namespace, name, number, say=tell), sender)


async def _copy_before_start(cluster: Cluster, copy: Copy, job: Resolved, node: int | None = None, sender: Sender | None = None) -> bool:
    """Copy to or from the volumes that the job will have. Missing claims are created, and short-lived pods mount them."""
    from lockstep.plan.render.readerpod import is_shared
    from lockstep.platforms.files.reader import reader, stateful_set_before_start

    stateful_set = await stateful_set_before_start(cluster, job)
    volumes = [0] if is_shared(stateful_set) else [*range(job.nodes)]
    return await _copy_to(copy, volumes, node, lambda number: reader(cluster, stateful_set, number, say=tell), sender)


async def _copy_to(
    copy: Copy,
    volumes: list[int],
    node: int | None,
    place_of: Callable[[int], AbstractAsyncContextManager[PodPlace]],
    sender: Sender | None = None,
) -> bool:
    """Copy to the volumes of all nodes, or of `node`, or from the first of them."""
    from lockstep.platforms.files.transfer import TransferProgress

    async def one(number: int) -> Carried:
        async with place_of(number) as place:
            return await _carried(copy, place, progress[f"node {number}"], sender)

    nodes = [node] if node is not None else volumes if copy.up else volumes[:1]
    with Meter() as meter:
        progress = meter.transfers = {f"node {number}": TransferProgress(meter.changed) for number in nodes}
        results = await asyncio.gather(*map(one, nodes), return_exceptions=True)
    done = [tell_result(copy, f"{copy.remote.job} node {number}", result) for number, result in zip(nodes, results, strict=True)]
    return all(done)


async def known_job(cluster: Cluster, namespace: str, name: str, hint: str = "") -> None:
    """Refuse a job that doesn't exist. Raises ConfigError, which names the jobs that do, and ends with the hint."""
    from lockstep.platforms.clusters.remove import JOB, all_of

    if await cluster.get("StatefulSet", namespace, name) is not None:
        return
    names = [str(job["metadata"]["name"]) for job in await all_of(cluster, JOB, namespace)]
    if name not in names:
        raise ConfigError(f"{unknown_job(name, namespace, names)}{hint}")


async def _carried(copy: Copy, place: PodPlace, progress: TransferProgress, sender: Sender | None) -> Carried:
    from lockstep.platforms.files.reader import place_roots
    from lockstep.platforms.files.transfer import get, put, refuse_outside

    roots = await place_roots(place, writing=copy.up)
    refuse_outside(copy.remote.path, roots)
    if copy.up:
        return await put(place, Path(copy.local), copy.remote.path, roots, progress, sender=sender)
    return await get(place, copy.remote.path, copy.local, roots, progress)
