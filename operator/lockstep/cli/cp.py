"""`lockstep cp SRC DST`: files between this machine and a job's volumes."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, LockstepError
from lockstep.cli.jobargs import ClusterNameOption, ContextOption, NamespaceOption, unknown_job
from lockstep.cli.meter import Meter, size
from lockstep.platforms.output import put, tell

if TYPE_CHECKING:
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.transfer import Carried, Progress

_REMOTE = re.compile(r"(?P<job>[a-z]([-a-z0-9]*[a-z0-9])?):(?P<path>.*)")
INTERRUPTED = 130


@dataclass(frozen=True)
class Remote:
    """A path on the volumes of a job."""

    job: str
    path: str


@dataclass(frozen=True)
class Copy:
    """What is asked: `local` and `remote`, and in which direction."""

    local: str
    remote: Remote
    up: bool


def cp(
    source: Annotated[str, typer.Argument(help="A file or folder: of this machine, or JOB:/path on a job's volumes.", show_default=False)],
    target: Annotated[str, typer.Argument(help="Where to: JOB:/path, or a path of this machine. With a / at the end: into that folder.")],
    node: Annotated[
        int | None, typer.Option("--node", min=0, help="The node whose volume is meant. Default: up to every node's, down from node 0's.")
    ] = None,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Copy files to a job's volumes, or from them: resumable, verified by SHA-256, each file in one piece or not at all.

    To pods that have volumes of their own it goes to all at once. Of a job without pods a short-lived pod without GPUs mounts the
    volumes. A target is the new name, and the same command goes on where a broken one was.

    Example: lockstep cp models/llama demo:/datasets/models/
    """
    from lockstep.cli.target import namespace_of

    copy = read(source, target)
    place = namespace_of(cluster, namespace, context)
    try:
        whole = asyncio.run(_copy(copy, place, context, node))
    except KeyboardInterrupt:
        tell("interrupted: what has arrived is kept, and the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    if not whole:
        raise typer.Exit(1)


def read(source: str, target: str) -> Copy:
    """Raises ConfigError unless exactly one of the two is on a job's volumes."""
    there = [_remote(source), _remote(target)]
    if there[0] is not None and there[1] is None:
        return Copy(target, there[0], up=False)
    if there[1] is not None and there[0] is None:
        if not Path(source).exists():
            raise ConfigError(f"{source} does not exist: name a file or folder of this machine")
        return Copy(source, there[1], up=True)
    raise ConfigError("one of SRC and DST must be JOB:/path and the other a path of this machine: lockstep cp ./model demo:/datasets/")


def _remote(text: str) -> Remote | None:
    found = _REMOTE.fullmatch(text)
    if found is None or text.startswith((".", "/")):
        return None
    path = found["path"]
    return Remote(found["job"], path if path.startswith("/") else f"/workspace/{path}")


async def _copy(copy: Copy, namespace: str, context: str | None, node: int | None) -> bool:
    """Whether everything is where it belongs."""
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.reader import nodes_with_volumes
    from lockstep.platforms.kubernetes.transfer import Progress

    async with await Cluster.connect(context) as cluster:
        await known_job(cluster, namespace, copy.remote.job)
        there = await nodes_with_volumes(cluster, namespace, copy.remote.job)
        if node is not None and node not in there and there != [0]:
            raise ConfigError(f"job {copy.remote.job} has no volume of node {node}: there are those of {', '.join(map(str, there))}")
        nodes = [node] if node is not None else there if copy.up else there[:1]
        with Meter() as meter:
            progress = {f"node {number}": Progress(meter.changed) for number in nodes}
            meter.transfers = progress
            one = [_one(cluster, copy, namespace, number, progress[f"node {number}"]) for number in nodes]
            results = await asyncio.gather(*one, return_exceptions=True)
    told = [_tell(copy, number, result) for number, result in zip(nodes, results, strict=True)]
    return all(told)


async def known_job(cluster: Cluster, namespace: str, name: str) -> None:
    """Raises ConfigError, naming the jobs that are there, when there is none of this name."""
    from lockstep.platforms.kubernetes.cluster import ApiError

    if await cluster.get("StatefulSet", namespace, name) is not None:
        return
    try:
        jobs = (await cluster.list("TrainingJob", namespace))["items"]
    except ApiError:  # (a cluster without the operator, or no right to see jobs)
        jobs = []
    known = [str(job["metadata"]["name"]) for job in jobs]
    if name not in known:
        raise ConfigError(unknown_job(name, namespace, known))


async def _one(cluster: Cluster, copy: Copy, namespace: str, node: int, progress: Progress) -> Carried:
    from lockstep.platforms.kubernetes.reader import beside, place_roots
    from lockstep.platforms.kubernetes.transfer import get, put, refuse_outside

    async with beside(cluster, namespace, copy.remote.job, node, say=tell) as place:
        roots = await place_roots(cluster, place, writing=copy.up)
        refuse_outside(copy.remote.path, roots)
        if copy.up:
            return await put(cluster, place, Path(copy.local), copy.remote.path, roots, progress)
        return await get(cluster, place, copy.remote.path, copy.local, roots, progress)


def _tell(copy: Copy, node: int, result: Any) -> bool:
    where = f"{copy.remote.job} node {node}"
    if isinstance(result, BaseException):
        if not isinstance(result, (LockstepError, OSError)):
            raise result
        if isinstance(result, ConfigError):
            raise result
        tell(f"{where}: not copied: {result}")
        return False
    done = (
        f"{result.sent} of {result.files} files copied ({size(result.bytes)})"
        if result.sent
        else f"{result.files} files were there already"
    )
    put(f"{where}: {done}" + (f", {result.resumed} of them went on where they were" if result.resumed else ""))
    return True
