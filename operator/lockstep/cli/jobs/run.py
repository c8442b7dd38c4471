"""`lockstep run`: a job file (-f) on a cluster, on hosts, in a namespace or here, or a script on all nodes of a dev environment."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import DEV_ENVIRONMENT, FRESH, HOSTS
from lockstep.api.names import WORKSPACE as JOB_WORKSPACE
from lockstep.api.objects import Typed
from lockstep.cli.shared.clusterfiles import cluster_of_hosts, is_workspace, read_text
from lockstep.cli.shared.inputs import Inputs, OptionalFileOption, SetOption, only, option_words, read_inputs
from lockstep.cli.shared.jobargs import TargetOptions, find_cluster_job, on_site, stated_place
from lockstep.cli.shared.target import is_embedded
from lockstep.platforms.jobs.terminal import agent_command, differs_there, digest_here, run_on_all_nodes
from lockstep.platforms.output import tell
from lockstep.platforms.places.backends import backend_of, words_to
from lockstep.platforms.places.orders import LOCAL, HostOptions, Order, refuse

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob
    from lockstep.kube.cluster import Cluster

ON_HOSTS, HERE, WITHOUT_OPERATOR, IN_ENVIRONMENT = (
    "On hosts",
    "On this machine",
    "In one namespace, without the operator",
    "A script in a dev environment",
)
"""Groups of options on the help page."""
PROGRAMS = {"--hosts": HOSTS, "--local": LOCAL}
"""Option → place where a program that is typed behind -- runs with it."""
PROCESSES_WHY = "is for a program behind --, on hosts (--hosts) or on this machine (--local); with -f: --set ranksPerNode="
REFUSED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "-f": {"is for a dev environment, and -f runs a job file: use one of them": ("--job", "SCRIPT"), PROCESSES_WHY: ("--nproc-per-node",)},
    "--hosts": {
        "can't be combined with --hosts, which runs a program on the hosts that it names": (
            "--job", "--local", "--in-namespace", "--cluster", "--nodes", "--fresh", "--preview", "--anyway",
        ),
    },
    "--local": {
        "can't be combined with --local -- PROGRAM, which runs a program on this machine": (
            "--job", "--in-namespace", "--cluster", "--namespace", "--context", "--detach", "--fresh", "--preview", "--first", "--without",
            "--anyway",
        ),
    },
    "SCRIPT": {
        PROCESSES_WHY: ("--nproc-per-node",),
        "is for a job file: name one with -f, or a program behind --": (
            "--hosts", "--local", "--in-namespace", "--nodes", "--set", "--fresh", "--preview", "--first", "--without", "--anyway",
        ),
    },
}  # fmt: skip
"""Form of the command → why it hasn't got options → these."""


@on_site
def run(
    where: TargetOptions,
    script: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to run on all nodes of a dev environment, with its arguments: a .py file, -- -m module, or a program.",
            show_default=False,
        ),
    ] = None,
    files: OptionalFileOption = None,
    changes: SetOption = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, max=1024, help="Number of nodes, instead of the job's.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train from step 0, as with resumeFrom: None. What an earlier run saved stays.")
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            help=(
                "Don't wait for the end. Return once the operator has accepted the job, or its ranks run on hosts, or the script has begun."
            ),
        ),
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="HOST,HOST|FILE",
            help="Hosts with commas between them, a hostfile, or a cluster file with platform: hosts.",
            show_default=False,
            rich_help_panel=ON_HOSTS,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node",
            min=1,
            max=64,
            help="With --hosts, or --local and a program: ranks on each node. Default: one for each GPU; without GPUs one with --local.",
            rich_help_panel=ON_HOSTS,
        ),
    ] = None,
    first: Annotated[
        str | None,
        typer.Option(
            "--first",
            metavar="HOST",
            help="The host that becomes node 0. Default: the first host of the cluster file.",
            show_default=False,
            rich_help_panel=ON_HOSTS,
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without", metavar="HOST", help="A host to leave out. May be repeated.", show_default=False, rich_help_panel=ON_HOSTS
        ),
    ] = None,
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Accept a network that is too slow for the weights that the job sends.", rich_help_panel=ON_HOSTS),
    ] = False,
    preview: Annotated[
        int | None,
        typer.Option(
            "--preview",
            min=1,
            help="With --local: train nothing. Print this many samples, and mark what the model would learn from them.",
            rich_help_panel=HERE,
        ),
    ] = None,
    in_namespace: Annotated[
        bool,
        typer.Option(
            "--in-namespace",
            help="Run on Kubernetes with the role admin in one namespace, without CRDs or the operator.",
            rich_help_panel=WITHOUT_OPERATOR,
        ),
    ] = False,
    job: Annotated[
        str | None,
        typer.Option("--job", help=f"The dev environment. Default: {DEV_ENVIRONMENT}.", show_default=False, rich_help_panel=IN_ENVIRONMENT),
    ] = None,
) -> None:
    """Run a job and follow it, or a script in a dev environment.

    A job file (-f) runs on a cluster: its operator gets the job, and you see the log until the end. It also runs on hosts (--cluster or
    --hosts), in one namespace without the operator (--in-namespace), and on this machine (--local). Exit code: 0 complete, 1 failed, 2 it
    can't run as written.

    On a cluster and on hosts the job doesn't need this terminal: Ctrl-C ends the output only, with exit code 130. If the same job runs
    already, you follow it. If another one has the name, nothing happens to it, and you read what you can do.

    Example: lockstep run -f job.yaml

    Example: lockstep run -f job.yaml --cluster barcelona -n team --set training.lora.rank=8 --detach

    Example: lockstep run -f job.yaml --cluster lab --nodes 2

    Example: lockstep run -f job.yaml --local --preview 3

    Example: lockstep run --hosts 192.168.1.100,lab1 --nproc-per-node 2 -- train.py --epochs 3

    Example: lockstep run --local --nproc-per-node 2 -- train.py --epochs 3

    What follows -- is a Python file, -m and a module, or another program, such as bash run.sh. On hosts, the folder where you are is sent
    to a folder of its own if the file is in it, and ranks work there; on this machine they work in the folder where you are.

    A script runs on all nodes of a dev environment. Ctrl-C stops its ranks, a second Ctrl-C kills them, and a lost connection stops them,
    too. The exit code is that of the rank that failed first.

    Example: lockstep run --job ml-dev-env train_multi_node.py --epochs 3
    """
    file, on_hosts = only(files, "run") if files else None, HostOptions(first, tuple(without or ()))
    stated: dict[str, object] = {
        "SCRIPT": script, "-f": file, "--job": job, "--hosts": hosts, "--in-namespace": in_namespace, "--local": where.workspace,
        "--cluster": None if where.workspace else where.cluster, "--namespace": where.namespace, "--context": where.context,
        "--nodes": nodes, "--set": changes, "--nproc-per-node": processes, "--detach": detach, "--fresh": fresh, "--preview": preview,
        "--first": first, "--without": without, "--anyway": anyway,
    }  # fmt: skip
    form = next((option for option in ("-f", *PROGRAMS) if stated[option] and (file or script)), "SCRIPT")
    for why, options in REFUSED[form].items():
        _refuse_options({option: stated[option] for option in options}, why)
    if form in PROGRAMS:
        from lockstep.cli.jobs.typed import TypedLine, typed_program

        inputs, found = typed_program(
            PROGRAMS[form], where, TypedLine(script or (), hosts or "", nodes, processes, changes or (), on_hosts)
        )
        raise typer.Exit(run_job(inputs, found, PROGRAMS[form], Typed(""), detach=detach, hosts=on_hosts))
    if file is None:
        raise typer.Exit(run_in_session(script or (), job or DEV_ENVIRONMENT, where, detach=detach))
    _refuse_options(
        {option: hosts and stated[option] for option in ("--local", "--cluster")},
        "says where the job runs, and so does --hosts: use one of them",
    )
    place = stated_place(where, in_namespace=in_namespace)
    wishes: dict[str, object] = {"--detach": detach, "--first": first, "--without": without, "--anyway": anyway, "--preview": preview}
    if place is not None:
        refuse(place, wishes | {"--hosts": hosts})
    changes = [*(changes or ()), *([f"nodes={nodes}"] if nodes else ()), *(fresh_changes(file) if fresh else ())]
    again: dict[str, object] = {"--cluster": where.cluster, "--hosts": hosts, "--first": first, "--without": without}
    named = replace(where, cluster=cluster_of_hosts(hosts, _job_name(file, changes))) if hosts else where
    inputs = _read_anywhere(file, named, changes) if place is None else read_inputs(file, named, changes)
    found = inputs.at(named)
    if place is None:
        place = found.kind
        refuse(place, wishes)
    if place == LOCAL:
        again = {**words_to(found.workspaces()[0])}
    words = option_words(again | {"-n": where.namespace, "--in-namespace": in_namespace})
    of_changes = [word for change in changes if change != FRESH for word in ("--set", change)]
    typed = Typed(str(file), (*words, *of_changes), tuple(changes), where.cluster, where.context)
    again = {"-f": file, **again, "--set": changes}
    raise typer.Exit(run_job(inputs, found, place, typed, again, detach=detach, anyway=anyway, samples=preview, hosts=on_hosts))


def run_job(
    inputs: Inputs, where: TargetOptions, place: str, typed: Typed, again: Mapping[str, object] | None = None, **wishes: Any
) -> int:
    """Run the job in a place, and return its exit code. What only an operator does is warned of where there is none. Raises ConfigError for
    a dev environment there, and as `Backend.run` does.

    `again`: options that start it again, which the job keeps where no API server does. `wishes`: fields of the order.
    """
    backend = backend_of(place, where)
    inputs = inputs.typed("run", again) if again and not backend.has_namespaces else inputs
    order = Order(inputs.job, inputs.cluster, typed, **wishes)
    if not backend.has_operator:
        backend.refuse("Interactive", order.job.spec.type == "Interactive")
        backend.ready(order)
        warn_ignored(order.job)
    where.tell_of(backend)
    return backend.run(order)


def _read_anywhere(file: Path, where: TargetOptions, changes: Sequence[str]) -> Inputs:
    """Return the job and its cluster, or hosts; where none is named, the cluster that verbs about jobs ask. Raises ConfigError, with the
    ways to run it, where that is not up.
    """
    inputs = read_inputs(file, where, changes, unnamed=lambda: where.named)
    if is_workspace(where.cluster or (where.verb.choice.cluster if where.verb.choice else "")):
        return inputs
    try:
        is_embedded(where.verb, inputs.cluster.cluster.name)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; or choose where else the job runs: --local (processes of this machine), --in-namespace (Kubernetes, role admin), or"
            " --cluster with a file of hosts"
        ) from None
    return inputs


def _job_name(file: Path, changes: Sequence[str]) -> str:
    """Name of the file's job, for a file of its hosts. What is piped in can be read once only."""
    from lockstep.api.files.jobfile import parse_job_file

    return "piped" if str(file) == "-" else parse_job_file(read_text(file), str(file), changes).metadata.name


def _refuse_options(options: Mapping[str, object], why: str) -> None:
    if wrong := [name for name, value in options.items() if value]:
        raise ConfigError(f"{', '.join(wrong)} {why}")


def fresh_changes(file: Path) -> list[str]:
    """Return the change that --fresh makes. Raises ConfigError for a script, of whose checkpoints Lockstep knows nothing."""
    from lockstep.api.files.jobfile import parse_job_file

    if str(file) != "-" and parse_job_file(read_text(file), str(file)).spec.training is None:
        raise ConfigError(
            f"--fresh is about training, and {file} runs a script, which finds its own checkpoints: remove them, or give it another folder"
        )
    return [FRESH]


def warn_ignored(job: TrainingJob) -> None:
    """Say which fields of the job nobody carries out where no operator is."""
    from lockstep.plan.reconcile.clocks import without_operator

    if ignored := without_operator(job.spec):
        tell(f"warning: {', '.join(ignored)} has no effect without the operator")


def run_in_session(words: Sequence[str], job: str, where: TargetOptions, *, detach: bool) -> int:
    """Run a script on all nodes of a dev environment. Return the exit code of the rank that failed first.

    The pods' copy runs: a warning says so where the file of this machine is another one.
    """
    if not words:
        raise ConfigError(
            "name what to run: a job file (lockstep run -f job.yaml), or a script on all nodes of a dev environment (lockstep run train.py)"
        )

    cluster_job = find_cluster_job(job, where)
    cluster_job.refuse_idle()
    command = agent_command(words, _who(), detach=detach)
    digest = digest_here(words, Path.cwd())

    async def started(cluster: Cluster) -> int:
        place, there = cluster_job.node(cluster, 0), f"{JOB_WORKSPACE}/{words[0]}"
        if digest and await differs_there(place, digest, there):
            tell(
                f"warning: {words[0]} here differs from {there} of the pods, which runs: lockstep sync {job} ."
                f" {cluster_job.backend.words.again}"
            )
        return await run_on_all_nodes(place, command)

    return cluster_job.run(started)


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name
        return socket.gethostname()
