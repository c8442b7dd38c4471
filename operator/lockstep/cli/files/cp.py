"""`lockstep cp SRC DST`: copy files between this machine and a job's volumes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, LockstepError
from lockstep.cli.shared.inputs import only
from lockstep.cli.shared.jobargs import UNNAMED, ContextOption, NamespaceOption, TargetOptions
from lockstep.cli.shared.kubesite import unknown_job
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.cli.shared.terminal import Meter
from lockstep.platforms.output import put, tell
from lockstep_spec.words import decimal_size

if TYPE_CHECKING:
    from lockstep.cli.shared.hostsite import HostSite
    from lockstep.kube.cluster import Cluster
    from lockstep.kube.exec import PodPlace
    from lockstep.plan.render.resolved import Resolved
    from lockstep.platforms.files.transfer import Carried, TransferProgress

_REMOTE = re.compile(r"(?P<job>[a-z]([-a-z0-9]*[a-z0-9])?):(?P<path>.*)")


@dataclass(frozen=True)
class Remote:
    """A path on the volumes of a job."""

    job: str
    path: str


@dataclass(frozen=True)
class Copy:
    """One copy: its local and its remote end, and its direction."""

    local: str
    remote: Remote
    up: bool


def cp(
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
            help="The job's file, for a job that has never started: it says which volumes the job will have.",
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
            help="On hosts: SRC is a path of this host, and goes from there to all hosts. This machine sends nothing.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help=f"The cluster file that names the namespace, and the API server that must answer. {UNNAMED}"),
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Copy files to or from a job's volumes: resumable, verified by SHA-256, each file whole or not at all.

    Where every pod has its own volumes, files go to all of them at once. On hosts (--cluster names a file of hosts) they go to the first, and from host to host; also before the job's first start. If the job has no pods, a short-lived pod without GPUs mounts the
    volumes. The target is the new name; with a / at its end it is a folder to copy into, and `SRC/.` means the content of a folder. If a copy
    breaks, run the same command again to continue.

    Example: lockstep cp models/llama demo:/datasets/models/

    Example: lockstep cp train.py config.json src/. demo:/workspace/

    Example: lockstep cp -f job.yaml train.py mine:
    """
    file = only(files, "cp") if files else None
    copies = read_all(sources, target) if origin is None else there(sources, target)
    site = _hosts(file, cluster, namespace, context)
    if site is None and origin is not None:
        raise ConfigError("--from names a host, which only a cluster file with platform: hosts has: name that file with --cluster")
    if site is not None:
        from lockstep.cli.files.cphosts import copy_on_hosts

        with exiting_on_ctrl_c("interrupted: what has arrived is kept; run the same command again to continue"):
            done = [asyncio.run(copy_on_hosts(copy, site, node, origin)) for copy in copies]
        raise typer.Exit(0 if all(done) else 1)
    before = None if file is None else _before_start(file, copies, cluster, namespace)
    place = before.namespace if before is not None else TargetOptions.of(cluster, namespace, context).chosen_namespace()
    with exiting_on_ctrl_c("interrupted: what has arrived is kept; run the same command again to continue"):
        done = [asyncio.run(_copy(copy, place, context, node, before)) for copy in copies]
    if not all(done):
        raise typer.Exit(1)


def _hosts(file: Path | None, cluster: str | None, namespace: str | None, context: str | None) -> HostSite | None:
    """Return the hosts that are meant; None for a Kubernetes cluster."""
    from lockstep.cli.shared.hostsite import HostSite

    if file is None:
        site = TargetOptions.of(cluster, namespace, context).site()
        return site if isinstance(site, HostSite) else None
    from lockstep.cli.shared.inputs import read_inputs

    inputs = read_inputs(file, cluster, namespace)
    return None if inputs.cluster.hosts is None else HostSite(inputs.cluster, cluster or inputs.cluster.cluster.name)


def _before_start(file: Path, copies: Sequence[Copy], cluster: str | None, namespace: str | None) -> Resolved:
    """Resolve a job from its file: it may never have started. Raises ConfigError."""
    from lockstep.cli.shared.inputs import read_inputs, resolve_inputs
    from lockstep_spec.choices import StorageMode

    inputs = read_inputs(file, cluster, namespace)
    inputs.aim()
    resolved = resolve_inputs(inputs)
    for copy in copies:
        if copy.remote.job != resolved.name:
            raise ConfigError(f"{file} is job {resolved.name}, and not {copy.remote.job}: lockstep cp -f {file} SRC {resolved.name}:")
    if resolved.storage_mode is not StorageMode.SHARED:
        raise ConfigError(
            f"storage.mode of job {resolved.name} is {resolved.storage_mode.value}: each pod's volume is made with the pod, so apply the job first and copy then"
        )
    return resolved


def read_all(sources: Sequence[str], target: str) -> list[Copy]:
    """Parse all copies of one command before anything is copied. Raises ConfigError."""
    each = [part for source in sources for part in _contents(source)]
    if (len(sources) > 1 or each != list(sources)) and not target.endswith("/"):
        raise ConfigError(f"{target}: several files go into a folder, whose name must end with /: lockstep cp a.py b.py {target}/")
    return [read(source, target) for source in each]


def there(sources: Sequence[str], target: str) -> list[Copy]:
    """Parse copies whose sources are paths of a host. Raises ConfigError."""
    remote = _remote(target)
    if remote is None:
        raise ConfigError(f"{target}: with --from the target is JOB:/path: lockstep cp --from lab0 ~/models/llama demo:/workspace/models/")
    if len(sources) > 1 and not target.endswith("/"):
        raise ConfigError(f"{target}: several files go into a folder, whose name must end with /: {target}/")
    if wrong := [source for source in sources if _remote(source) is not None]:
        raise ConfigError(f"{wrong[0]}: with --from the source is a path of that host, such as ~/models/llama")
    return [Copy(source, remote, up=True) for source in sources]


def _contents(source: str) -> list[str]:
    """A folder of this machine that is named as `.` or `x/.` stands for what is in it, as with scp and cp."""
    if source != "." and not source.endswith("/."):
        return [source]
    folder = Path(source)
    if not folder.is_dir():
        raise ConfigError(f"{source} is not a folder: name a file or folder of this machine")
    names = sorted(str(folder / path.name) for path in folder.iterdir())
    if not names:
        raise ConfigError(f"{source} is empty: there is nothing to copy")
    return names


def read(source: str, target: str) -> Copy:
    """Parse one copy. Raises ConfigError unless exactly one of the two ends is on a job's volumes."""
    remotes = [_remote(source), _remote(target)]
    if remotes[0] is not None and remotes[1] is None:
        return Copy(target, remotes[0], up=False)
    if remotes[1] is not None and remotes[0] is None:
        if not Path(source).exists():
            raise ConfigError(f"{source} does not exist: name a file or folder of this machine")
        return Copy(source, remotes[1], up=True)
    raise ConfigError("one of SRC and DST must be JOB:/path and the other a path of this machine: lockstep cp ./model demo:/datasets/")


def _remote(text: str) -> Remote | None:
    match = _REMOTE.fullmatch(text)
    if match is None or text.startswith((".", "/")):
        return None
    path = match["path"]
    return Remote(match["job"], path if path.startswith("/") else f"/workspace/{path}")


async def _copy(copy: Copy, namespace: str, context: str | None, node: int | None, before: Resolved | None) -> bool:
    """Copy, and return True if everything arrived. `before`: the job as its file describes it, if it may never have started."""
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.files.reader import nodes_with_volumes
    from lockstep.platforms.files.transfer import TransferProgress

    async with await Cluster.connect(context) as cluster:
        if before is not None and await cluster.get("StatefulSet", namespace, copy.remote.job) is None:
            return await _copy_before_start(cluster, copy, before)
        await known_job(cluster, namespace, copy.remote.job)
        volumes = await nodes_with_volumes(cluster, namespace, copy.remote.job)
        if node is not None and node not in volumes and volumes != [0]:
            raise ConfigError(f"job {copy.remote.job} has no volume of node {node}: it has those of {', '.join(map(str, volumes))}")
        nodes = [node] if node is not None else volumes if copy.up else volumes[:1]
        with Meter() as meter:
            progress = {f"node {number}": TransferProgress(meter.changed) for number in nodes}
            meter.transfers = progress
            one = [_one(cluster, copy, namespace, number, progress[f"node {number}"]) for number in nodes]
            results = await asyncio.gather(*one, return_exceptions=True)
    done = [tell_result(copy, f"{copy.remote.job} node {number}", result) for number, result in zip(nodes, results, strict=True)]
    return all(done)


async def _copy_before_start(cluster: Cluster, copy: Copy, job: Resolved) -> bool:
    """Copy to or from the volumes that all pods of the job will share. Missing claims are created, and a short-lived pod mounts them."""
    from lockstep.platforms.files.reader import reader, stateful_set_before_start
    from lockstep.platforms.files.transfer import TransferProgress

    stateful_set = await stateful_set_before_start(cluster, job)
    with Meter() as meter:
        progress = TransferProgress(meter.changed)
        meter.transfers = {"node 0": progress}
        async with reader(cluster, stateful_set, say=tell) as place:
            carried = await _carried(copy, place, progress)
    return tell_result(copy, f"{copy.remote.job} node 0", carried)


async def known_job(cluster: Cluster, namespace: str, name: str) -> None:
    """Refuse a job that doesn't exist. Raises ConfigError, which names the jobs that do."""
    from lockstep.kube.cluster import NOT_FOUND, ApiError

    if await cluster.get("StatefulSet", namespace, name) is not None:
        return
    try:
        jobs = (await cluster.list("TrainingJob", namespace))["items"]
    except ApiError as error:
        if error.status != NOT_FOUND:  # a cluster without the operator
            raise
        jobs = []
    names = [str(job["metadata"]["name"]) for job in jobs]
    if name not in names:
        raise ConfigError(f"{unknown_job(name, namespace, names)}; before its first start: lockstep cp -f FILE SRC {name}:")


async def _one(cluster: Cluster, copy: Copy, namespace: str, node: int, progress: TransferProgress) -> Carried:
    from lockstep.platforms.files.reader import beside

    async with beside(cluster, namespace, copy.remote.job, node, say=tell) as place:
        return await _carried(copy, place, progress)


async def _carried(copy: Copy, place: PodPlace, progress: TransferProgress) -> Carried:
    from lockstep.platforms.files.reader import place_roots
    from lockstep.platforms.files.transfer import get, put, refuse_outside

    roots = await place_roots(place, writing=copy.up)
    refuse_outside(copy.remote.path, roots)
    if copy.up:
        return await put(place, Path(copy.local), copy.remote.path, roots, progress)
    return await get(place, copy.remote.path, copy.local, roots, progress)


def tell_result(copy: Copy, where: str, result: Any) -> bool:
    if isinstance(result, BaseException):
        if not isinstance(result, (LockstepError, OSError)):
            raise result
        if isinstance(result, ConfigError):
            raise result
        tell(f"{where}: not copied: {result}")
        return False
    done = (
        f"{result.sent} of {_files(result.files)} copied ({decimal_size(result.bytes)})"
        if result.sent
        else f"{_files(result.files)} {'was' if result.files == 1 else 'were'} there already"
    )
    resumed = f", {result.resumed} of them went on where they were" if result.resumed else ""
    put(f"{where}: {done}{resumed}, {'to' if result.sent else 'at'} {place_of(copy)}")
    return True


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def place_of(copy: Copy) -> str:
    """Path of the copy: a target that ends with a / is the folder that it is in."""
    target, source = (copy.remote.path, copy.local) if copy.up else (copy.local, copy.remote.path)
    into = target.endswith(("/", "/.", "/..")) or target in (".", "..")
    return f"{target.rstrip('/')}/{Path(source).resolve().name if copy.up else PurePosixPath(source).name}" if into else target
