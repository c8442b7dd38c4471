"""`lockstep cluster list` and `lockstep use`: the cluster files that have names here, and the cluster that is meant where none is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import HOSTS, KUBERNETES
from lockstep.cli.shared.clusterfiles import cluster_names, load_cluster, memorable
from lockstep.cli.shared.folders import remember, remembered
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.target import current_server, in_use, is_talked_to
from lockstep.cli.shared.terminal import console
from lockstep.platforms.output import put
from lockstep_spec.choices import StorageMode

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.hosts import HostsCluster


@acts_on("context")
def list_clusters(where: TargetOptions) -> None:
    """List the cluster files that have names here.

    A * marks the one that your kubeconfig's context talks to. The verb asks no cluster.

    Example: lockstep cluster list
    """
    server, mistakes = current_server(where.connections), list[str]()
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "NAME", "PLATFORM", "NODES", "GPUS", "FABRIC", "STORAGE", "NAMESPACE", "DESCRIPTION"):
        table.add_column(column, overflow="fold")
    for name in cluster_names():
        try:
            cluster_file = load_cluster(name)
            table.add_row("*" if server is not None and is_talked_to(cluster_file, server) else "", *_row(cluster_file))
        except ConfigError as error:
            mistakes += map(str, error.args)
            table.add_row("", name, "(has mistakes)")
    console().print(table)
    if mistakes:
        raise ConfigError(*mistakes)


def use(
    cluster: Annotated[
        str | None,
        typer.Argument(
            help="A cluster's name, a cluster file's path, or the folder of a workspace of this machine. Default: say which one counts.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Choose the cluster of verbs that name none.

    Without an argument, it says which one counts here, and why.

    The first of these counts: --cluster; a job's spec.cluster; the environment variable LOCKSTEP_CLUSTER; the file .lockstep/cluster of the
    folder where you are, which this verb writes in a checkout; the cluster that it chose elsewhere; your kubeconfig's.

    Example: lockstep use lab
    """
    if cluster is not None:
        remember(memorable(cluster))
    every = remembered()
    if not every:
        put("nothing names a cluster: verbs ask your kubeconfig's, or the embedded one if it is up; lockstep use CLUSTER chooses one")
    for number, choice in enumerate(every):
        put(f"{'not ' if number else ''}{choice.cluster} ({choice.by})")
    in_use()  # (one that is gone is an error)


def _row(file: ClusterFile) -> tuple[str, ...]:
    fabric = "RDMA, TCP" if file.profile.spec.network.rdma.enabled else "TCP"
    platform, nodes, gpus, storage, namespace = {HOSTS: _of_hosts, KUBERNETES: _of_cluster}[file.kind](file)
    return file.cluster.name, platform, nodes, gpus, fabric, storage, namespace, file.cluster.description


def _of_hosts(file: ClusterFile) -> tuple[str, str, str, str, str]:
    hosts, is_shared = file.its_hosts(file.cluster.name), file.profile.spec.storage.mode is StorageMode.SHARED
    return HOSTS, str(len(hosts.hosts)), _gpus(hosts), "rwx" if is_shared else "per host", ""


def _of_cluster(file: ClusterFile) -> tuple[str, str, str, str, str]:
    spec = file.profile.spec
    rwx, rwo = f"rwx {spec.storage.class_rwx or ''}", f"per pod {spec.storage.class_rwo or ''}"
    gpus = f"{spec.gpus.per_node} x {spec.gpus.type or 'GPU'}" if spec.gpus.per_node else "none"
    storage = (rwx if spec.storage.mode is StorageMode.SHARED else rwo).strip()
    return spec.platform.value, str(len(spec.nodes.gpu_nodes) or "any"), gpus, storage, file.cluster.namespace


def _gpus(hosts: HostsCluster) -> str:
    """GPUs of each host that jobs may take, in the order of the hosts; once where they are the same."""
    counts = ["all" if host.gpus is None else str(len(host.gpus) if isinstance(host.gpus, list) else host.gpus) for host in hosts.hosts]
    return ", ".join(counts) if len(set(counts)) > 1 else counts[0]
