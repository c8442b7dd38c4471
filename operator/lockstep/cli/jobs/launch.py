"""`lockstep launch` and `lockstep join`: a job on machines that have a terminal each, without Kubernetes and without ssh."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Typed
from lockstep.cli.jobs.run import run_job, warn_ignored
from lockstep.cli.shared.inputs import FileOption, SetOption, only, read_inputs
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.ownversion import own_version
from lockstep.platforms.local.environment import in_full_environment
from lockstep.platforms.places.backends import DEFAULT_WORKSPACE
from lockstep.platforms.places.orders import LOCAL, Door, lack

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob
    from lockstep.platforms.local.joined.starters import NodeNumber

TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", show_default=False,
        help="A file with the token, which only you may read. launch makes it if it doesn't exist; its default is in ~/.local/state.",
    ),
]  # fmt: skip


@acts_on("cluster", here=True)
def launch(
    where: TargetOptions,
    file: FileOption,
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="ADDRESS:PORT",
            show_default=False,
            help="This machine's address, as the other machines reach it, and the first of the 66 ports that the launch takes.",
        ),
    ],
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, max=64, help="Number of machines, instead of the job's nodes.")] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="N|auto",
            show_default=False,
            help=(
                "This machine's number, if you type the same command on all machines: 0 launches, the others join. auto: take it from srun"
                " or mpirun."
            ),
        ),
    ] = None,
    token_file: TokenFileOption = None,
    changes: SetOption = None,
) -> None:
    """Run a job on several machines, without Kubernetes or ssh.

    This machine is node 0, and the others join.

    Type the line that it prints on the other machines, before or after this one. Each machine may have its own folder, which
    --cluster names; a cluster file says what the job leaves open.
    Ctrl-C saves on all machines and stops; the same command starts the job again, from its last checkpoint if it has committed one. Exit
    codes: 0 complete, 1 failed, 2 it can't run as written, 130 interrupted.

    Example: lockstep launch --at 10.11.7.50:29600 -f job.yaml --nodes 2

    Example: srun --ntasks-per-node=1 lockstep launch --node auto --at 10.11.7.50:29600 -f job.yaml --token-file /shared/me/token
    """
    from lockstep.platforms.local.joined.join import JoinRequest, join_launch
    from lockstep.platforms.local.joined.machine import parse_place

    path, place, number = only(file, "launch"), parse_place(at), _number(node, token_file)
    folder = where.workspace or DEFAULT_WORKSPACE
    inputs = read_inputs(path, replace(where, cluster=where.cluster or str(folder)), changes)
    own = {"--cluster": where.cluster, "--set": changes}
    inputs = inputs.typed("launch", {"--at": at, "-f": path, "--nodes": nodes, "--node": node, "--token-file": token_file, **own})
    job = _with_nodes(inputs.job, nodes, number)
    door = Door(place, own_version(), token_file, number.signals_all)
    if number.index > 0:
        in_full_environment()
        if job.spec.type == "Interactive":
            raise lack(LOCAL, "Interactive")
        warn_ignored(job)
        raise typer.Exit(join_launch(JoinRequest(door, folder, number.index, job.spec.start_timeout_seconds)))
    raise typer.Exit(run_job(replace(inputs, job=job), replace(where, cluster=str(folder)), LOCAL, Typed(""), door=door))


@acts_on("cluster", here=True)
def join(
    where: TargetOptions,
    at: Annotated[
        str, typer.Argument(metavar="ADDRESS:PORT", help="The address and port that lockstep launch has printed.", show_default=False)
    ],
    token_file: TokenFileOption = None,
    node: Annotated[
        int | None, typer.Option("--node", min=1, max=63, help="This machine's number. Default: the next one in the order of joining.")
    ] = None,
) -> None:
    """Be a node of a job that another machine launches.

    It waits for the launch, and ends with the job.

    You give the token at the terminal, on standard input or by --token-file. It is never an argument, because others on this machine
    could read that. If this machine restarts, type the same line again: it gets its node back. The exit code is that of the launch.

    Example: lockstep join 10.11.7.50:29600

    Example: lockstep join 10.11.7.50:29600 --cluster /scratch/me < token
    """
    from lockstep.platforms.local.joined.join import JoinRequest, join_launch
    from lockstep.platforms.local.joined.machine import parse_place
    from lockstep.platforms.local.joined.token import token_to_join

    place, folder = parse_place(at), where.workspace or DEFAULT_WORKSPACE
    if where.cluster and where.workspace is None:
        raise ConfigError(f"--cluster names this machine's folder for the job, and {where.cluster} is none that is there")
    in_full_environment(check=lambda: token_file and token_to_join(token_file))
    raise typer.Exit(join_launch(JoinRequest(Door(place, own_version(), token_file), folder, node)))


def _number(text: str | None, token_file: Path | None) -> NodeNumber:
    """Return this machine's number: 0 if it was given none. Raises ConfigError."""
    from lockstep.platforms.local.joined.starters import NodeNumber, node_number

    if text is None:
        return NodeNumber(0)
    if token_file is None:
        raise ConfigError("--node makes this command the same on all machines: add --token-file FILE, a path that all of them see")
    return node_number(text, os.environ)


def _with_nodes(job: TrainingJob, nodes: int | None, number: NodeNumber) -> TrainingJob:
    """Return the job of as many nodes as was said, by --nodes or by the starter. Raises ConfigError when they differ."""
    if nodes is not None and number.nodes is not None and nodes != number.nodes:
        raise ConfigError(f"--nodes is {nodes}, but the starter has started {number.nodes}: leave --nodes out")
    chosen = nodes or number.nodes or job.spec.nodes
    if chosen is not None and number.index >= chosen:
        raise ConfigError(f"--node is {number.index}, must be 0 to {chosen - 1}: there are {chosen} nodes")
    return job if chosen is None else job.model_copy(update={"spec": job.spec.model_copy(update={"nodes": chosen})})
