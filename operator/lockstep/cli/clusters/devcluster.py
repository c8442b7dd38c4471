"""`lockstep devcluster`: a real Kubernetes on this machine, without Docker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.clusters.bed import app as hosts_app
from lockstep.cli.clusters.bed import say
from lockstep.cli.shared.embedded import embedded_layout, machine_failures
from lockstep.cli.shared.jobargs import Form, FormOption
from lockstep.cli.shared.trainer import in_full_environment
from lockstep.platforms.output import put, put_json, tell

if TYPE_CHECKING:
    from lockstep.devcluster.host.layout import Layout

app = typer.Typer(help="Run a real Kubernetes on this machine, without Docker.", no_args_is_help=True)

app.add_typer(hosts_app, name="hosts")


def bring_up(nodes: int = 2, resources: list[str] | None = None, rails: int | None = None) -> Path:
    """Bring the embedded cluster up and Ready, and return its kubeconfig.

    Raises:
        ConfigError: this machine can't do it; the message lists what is missing.
    """
    layout = embedded_layout()
    from lockstep.devcluster.cluster import ClusterGoal, parse_resources
    from lockstep.devcluster.cluster import up as bring_cluster_up

    goal = ClusterGoal(nodes=nodes, resources=parse_resources(resources, nodes) if resources else None, rails=rails)
    in_full_environment(check=lambda: _install(layout))
    _install(layout)
    return bring_cluster_up(layout, goal, say)


def _install(layout: Layout) -> None:
    from lockstep.devcluster.host.processes import shared_things
    from lockstep.devcluster.hosts.needs import ensure

    with shared_things(layout.root):
        ensure(layout, say)


@app.command("up")
def up(
    nodes: Annotated[int, typer.Option(min=1, max=9, help="How many nodes.")] = 2,
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
) -> None:
    """Bring the cluster up, or repair it: what runs is left alone.

    Example: lockstep devcluster up --resource nvidia.com/gpu=4
    """
    with machine_failures():
        put(f"export KUBECONFIG={bring_up(nodes, resource, rails)}")


@app.command("prepare")
def prepare() -> None:
    """Build what the first `up` waits for, and start nothing.

    Use it for the image of a CI machine, for example.

    Example: lockstep devcluster prepare
    """
    layout = embedded_layout()
    from lockstep.devcluster.cluster import prepare as make_ready

    with machine_failures():
        in_full_environment(check=lambda: _install(layout))
        _install(layout)
        make_ready(layout, say)


@app.command("down")
def down(purge: Annotated[bool, typer.Option(help="Remove images in the nodes and the data of claims, too.")] = False) -> None:
    """Remove the cluster.

    Its images and the data of claims are kept for the next `up`.

    Example: lockstep devcluster down --purge
    """
    from lockstep.cli.shared.folders import forget
    from lockstep.cli.shared.target import EMBEDDED
    from lockstep.devcluster.cluster import down as take_down

    if os.geteuid() != 0:
        raise ConfigError("only root can remove the embedded cluster: sudo lockstep devcluster down")
    with machine_failures():
        take_down(embedded_layout(), say, purge=purge)
    forget(EMBEDDED)


@app.command("status")
def devcluster_status(output: FormOption = Form.TEXT) -> None:
    """Say which parts run. Exit code 1 when the cluster isn't up.

    Example: lockstep devcluster status -o json
    """
    from lockstep.devcluster.cluster import status as state_of

    state = state_of(embedded_layout())
    if output is Form.JSON:
        put_json(state)
    else:
        for name, runs in state["daemons"].items():
            put(f"{name:32} {'running' if runs else 'ended'}")
        for name, ready in state["nodes"].items():
            put(f"{name:32} {'Ready' if ready else 'NotReady'}")
        if not state["daemons"]:
            put("the cluster is down: lockstep devcluster up")
    if not state["nodes"] or not all(state["nodes"].values()) or not all(state["daemons"].values()):
        raise typer.Exit(1)


@app.command("kubeconfig")
def kubeconfig() -> None:
    """Print the path of the administrator's kubeconfig.

    Example: export KUBECONFIG=$(lockstep devcluster kubeconfig)
    """

    put(embedded_layout().kubeconfig)


if __name__ == "__main__":
    try:
        app()
    except ConfigError as problem:
        tell(f"lockstep: {problem}")
        sys.exit(2)
