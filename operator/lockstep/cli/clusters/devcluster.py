"""`lockstep devcluster`: a real Kubernetes on this machine, and hosts with a systemd, an sshd and users each, both without Docker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.embedded import embedded_layout, machine_failures
from lockstep.cli.shared.folders import forget, state_folder
from lockstep.cli.shared.jobargs import Form, FormOption
from lockstep.cli.shared.target import EMBEDDED
from lockstep.platforms.local.environment import in_full_environment
from lockstep.platforms.output import put, put_json, tell

if TYPE_CHECKING:
    from lockstep.devcluster.host.layout import Layout

BED = "hosts.yaml"
"""Copy of the hosts' cluster file, in the folder of what is remembered: the cluster that is meant after quickstart --hosts."""


def say(text: str) -> None:
    put(f"devcluster: {text}", flush=True)


def bring_up(nodes: int = 2, resources: list[str] | None = None, rails: int | None = None) -> Path:
    """Bring the embedded cluster up and Ready, and return its kubeconfig.

    Raises:
        ConfigError: this machine can't do it; the message lists what is missing.
    """
    layout = embedded_layout()
    from lockstep.devcluster.cluster import ClusterGoal, parse_resources
    from lockstep.devcluster.cluster import up as bring_cluster_up

    goal = ClusterGoal(nodes=nodes, resources=parse_resources(resources, nodes) if resources else None, rails=rails)
    _install(layout)
    return bring_cluster_up(layout, goal, say)


def bring_hosts_up(hosts: int) -> Path:
    """Bring up so many hosts, and return the cluster file that describes them. Raises ConfigError where this machine can't have any."""
    from lockstep.devcluster.hosts.bed import up
    from lockstep.devcluster.hosts.layout import default_bed
    from lockstep.devcluster.hosts.needs import HOSTS, ensure

    bed = default_bed()
    with machine_failures():
        in_full_environment(check=lambda: ensure(HOSTS, bed, say))
        return up(bed, hosts, say)


def _install(layout: Layout) -> None:
    from lockstep.devcluster.host.processes import shared_things
    from lockstep.devcluster.hosts.needs import CLUSTER, ensure

    def install() -> None:
        with shared_things(layout.root):
            ensure(CLUSTER, layout, say)

    in_full_environment(check=install)
    install()


def up(
    nodes: Annotated[int | None, typer.Option(min=1, max=9, help="How many nodes. Default: 2.", show_default=False)] = None,
    resource: Annotated[
        list[str] | None, typer.Option(help="A pretended resource of every node, or of one: nvidia.com/gpu=4, 1:nvidia.com/gpu=4.")
    ] = None,
    rails: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=8,
            help="Number of further networks of every node, with Multus and pretended RDMA devices. Default: as many as it has.",
        ),
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=99,
            help="How many hosts to reach over ssh. Without another option, no Kubernetes is brought up beside them.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Bring the cluster or the hosts up, or repair them.

    What runs is left alone. The last line names the kubeconfig, or the hosts' cluster file.

    Example: lockstep devcluster up --resource nvidia.com/gpu=4

    Example: lockstep devcluster up --hosts 3
    """
    with machine_failures():
        if hosts is None or nodes is not None or resource or rails is not None:
            put(f"export KUBECONFIG={bring_up(nodes or 2, resource, rails)}")
    if hosts is not None:
        put(bring_hosts_up(hosts))


def prepare() -> None:
    """Build what the first `up` waits for, and start nothing."""
    from lockstep.devcluster.cluster import prepare as make_ready

    layout = embedded_layout()
    with machine_failures():
        _install(layout)
        make_ready(layout, say)


def down(
    purge: Annotated[bool, typer.Option(help="Remove images in the nodes, the data of claims and the hosts' disks, too.")] = False,
) -> None:
    """Remove the cluster and the hosts.

    Images, the data of claims and the hosts' disks are kept for the next `up`.

    Example: lockstep devcluster down --purge
    """
    from lockstep.devcluster.cluster import down as take_down
    from lockstep.devcluster.hosts.bed import down as take_hosts_down
    from lockstep.devcluster.hosts.layout import default_bed

    if os.geteuid() != 0:
        raise ConfigError("only root can remove the embedded cluster and hosts: sudo lockstep devcluster down")
    layout, bed = embedded_layout(), default_bed()
    with machine_failures():
        if bed.state.exists():
            take_hosts_down(bed, say, purge=purge)
            (state_folder() / BED).unlink(missing_ok=True)
        take_down(layout, say, purge=purge)
    forget(EMBEDDED)


def devcluster_status(output: FormOption = Form.TEXT) -> None:
    """Say which parts of the cluster and which hosts run.

    It ends with the line that sets KUBECONFIG, and the hosts' cluster file. Exit code 1: a part has ended, or nothing is up.

    Example: lockstep devcluster status -o json
    """
    from lockstep.devcluster.cluster import status as state_of
    from lockstep.devcluster.hosts.bed import status as hosts_of
    from lockstep.devcluster.hosts.layout import default_bed

    layout, bed = embedded_layout(), default_bed()
    state, hosts = state_of(layout), hosts_of(bed)
    daemons, nodes, has_hosts = state["daemons"], state["nodes"], any(hosts.values())
    if output is Form.JSON:
        put_json(state | {"hosts": hosts, "clusterFile": str(bed.cluster_file)})
    else:
        words = [(daemons, "running", "ended"), (nodes, "Ready", "NotReady"), (hosts, "on", "off")]
        for name, text in ((name, yes if runs else no) for parts, yes, no in words for name, runs in parts.items()):
            put(f"{name:32} {text}")
        if not daemons and not has_hosts:
            put("the cluster is down: lockstep devcluster up")
        if daemons:
            put(f"export KUBECONFIG={state['kubeconfig']}")
        if has_hosts:
            put(bed.cluster_file)
    up = [parts for parts, is_up in (([bool(nodes), *daemons.values(), *nodes.values()], daemons), (hosts.values(), has_hosts)) if is_up]
    if not up or not all(map(all, up)):
        raise typer.Exit(1)


if __name__ == "__main__":  # (make cluster-programs)
    try:
        prepare()
    except ConfigError as problem:
        tell(f"lockstep: {problem.args[0]}", *problem.args[1:])
        sys.exit(2)
