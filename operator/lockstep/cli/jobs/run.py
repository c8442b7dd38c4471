"""`lockstep run`: a job file without the operator (-f), or a script on all nodes of a dev environment."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import DEV_ENVIRONMENT
from lockstep.cli.shared.inputs import FRESH, NamespaceOption, OptionalFileOption, SetOption, only, read_inputs
from lockstep.platforms.output import tell

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster
    from lockstep.api.job import TrainingJob


import asyncio
import getpass
import socket
from collections.abc import Sequence
from typing import Any

from lockstep.cli.shared.jobargs import Found, find_job

LOCAL_CLUSTER = "local"


def run(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to run on all nodes of a dev environment, with its arguments: a .py file, -- -m module, or a program.",
            show_default=False,
        ),
    ] = None,
    job: Annotated[str | None, typer.Option("--job", help=f"The dev environment. Default: {DEV_ENVIRONMENT}.", show_default=False)] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Of a script: don't wait for its end. It goes on, and its output is in the log.")
    ] = False,
    files: OptionalFileOption = None,
    local: Annotated[bool, typer.Option("--local", help="As processes of this machine: no cluster, no root.")] = False,
    in_namespace: Annotated[
        bool, typer.Option("--in-namespace", help="On Kubernetes with the role admin in one namespace: no CRD, no operator.")
    ] = False,
    attach: Annotated[
        bool, typer.Option("--attach", help="With --in-namespace: follow the run that is there, to its end, and let its nodes go then.")
    ] = False,
    namespace: NamespaceOption = None,
    context: Annotated[str | None, typer.Option("--context", help="Of the kubeconfig.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A cluster of clusters/, or a cluster file's path. Default with --local: local.")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, max=64, help="Instead of the job's.")] = None,
    changes: SetOption = None,
    workspace: Annotated[
        Path, typer.Option("--workspace", help="With --local: its folders workspace/ and datasets/ stand for /workspace and /datasets.")
    ] = Path(".lockstep/workspace"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train anew from step 0, as with resumeFrom: None. What an earlier run has saved stays.")
    ] = False,
    preview: Annotated[
        int | None,
        typer.Option(
            "--preview", min=1, help="With --local: print so many samples of the data, what is learned marked, and train nothing."
        ),
    ] = None,
) -> None:
    """Run a script on all nodes of a dev environment, or a job file to its end without the operator.

    A script's exit code is that of the rank that failed first; Ctrl-C stops all ranks, twice kills them, and so does a connection that is lost.
    A job's: 0 complete, 1 failed. 2: it can't run as written, 130: interrupted.

    Example: lockstep run --job ml-dev-env train_multi_node.py --epochs 3

    Example: lockstep run -f job.yaml --local --set training.lora.rank=8 --set nodes=1

    Example: lockstep run -f job.yaml --local --preview 3
    """
    file = only(files, "run") if files else None
    if file is None:
        from lockstep.cli.shared.target import unnamed_cluster

        _refuse_file_options(
            {
                "--local": local,
                "--in-namespace": in_namespace,
                "--attach": attach,
                "--nodes": nodes,
                "--set": changes,
                "--fresh": fresh,
                "--preview": preview,
            }
        )
        raise typer.Exit(_run_in_job(script, job, (cluster or unnamed_cluster(context), namespace, context), detach=detach))
    if script or job or detach:
        raise ConfigError("-f runs a job file, --job and a script run something in a dev environment: say one of them")
    changes = [*(changes or ()), *(_fresh(file) if fresh else ())]
    if local == in_namespace:
        given = "".join(f" --set {shlex.quote(change)}" for change in changes)
        raise ConfigError(
            "say where the job should run: --local (processes of this machine) or --in-namespace (Kubernetes, role admin); "
            f"with the operator: lockstep render -f {file}{given} -o job | kubectl apply -f -"
        )
    if in_namespace:
        if preview is not None:
            raise ConfigError("--preview reads the data on this machine: say --local")
        raise typer.Exit(_run_in_namespace(file, cluster, namespace, context, changes, attach=attach))
    if attach:
        raise ConfigError("--attach follows a run on Kubernetes: say --in-namespace")
    read, profile = _read_local(file, cluster or LOCAL_CLUSTER, nodes, changes)
    raise typer.Exit(_run_local(read, profile, workspace) if preview is None else _preview(read, profile, workspace, preview))


def _fresh(file: Path) -> list[str]:
    """The change that --fresh makes. Raises ConfigError for a script, of whose checkpoints Lockstep knows nothing."""
    from lockstep.api.files.jobfile import parse_job_file
    from lockstep.cli.shared.clusterfiles import read_text

    if str(file) != "-" and parse_job_file(read_text(file), str(file)).spec.training is None:
        raise ConfigError(
            f"--fresh is about training, and {file} runs a script, which finds its own checkpoints: remove them, or tell it another folder"
        )
    return [FRESH]


def _refuse_file_options(given: dict[str, object]) -> None:
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} is about a job file: name it with -f")


def _run_in_job(script: list[str] | None, job: str | None, place: tuple[str, str | None, str | None], *, detach: bool) -> int:
    if not script:
        raise ConfigError(
            "say what to run: a job file (-f job.yaml --local), or a script on all nodes of a dev environment (lockstep run train.py)"
        )
    return run_in_job(script, job or DEV_ENVIRONMENT, place, detach=detach)


def refuse_interactive(job: TrainingJob) -> None:
    """Raises ConfigError: its nodes wait for what people ask for, and its GPUs are released by the operator alone."""
    if job.spec.type == "Interactive":
        raise ConfigError(
            "a job of type Interactive needs the operator: kubectl apply -f it; for one run without it, name the script in spec.script"
        )


def _run_in_namespace(
    file: Path, cluster: str | None, namespace: str | None, context: str | None, changes: list[str] | None, *, attach: bool
) -> int:
    from lockstep.platforms.in_namespace.run import How, run_in_namespace

    inputs = read_inputs(file, cluster, namespace, changes)
    refuse_interactive(inputs.job)
    _warn(inputs.job)
    return run_in_namespace(inputs.job, inputs.cluster.profile, inputs.namespace, context, How.ATTACH if attach else How.NEW)


def _read_local(file: Path, cluster: str, nodes: int | None, changes: list[str] | None) -> tuple[TrainingJob, TrainingCluster]:
    inputs = read_inputs(file, cluster, None, changes)
    refuse_interactive(inputs.job)
    _warn(inputs.job)
    job = inputs.job
    if nodes is not None:
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"nodes": nodes})})
    return job, inputs.cluster.profile


def _run_local(job: TrainingJob, profile: TrainingCluster, workspace: Path) -> int:
    from lockstep.platforms.local.run import run_local

    return run_local(job, profile, workspace)


def _preview(job: TrainingJob, profile: TrainingCluster, workspace: Path, samples: int) -> int:
    from lockstep.cli.shared.trainer import EXIT_FAILED, EXIT_USAGE
    from lockstep.platforms.local.preview import preview_local
    from lockstep_spec.exits import CONFIGURATION

    code = preview_local(job, profile, workspace, samples)
    return {0: 0, CONFIGURATION: EXIT_USAGE}.get(code, EXIT_FAILED)


def _warn(job: TrainingJob) -> None:
    from lockstep.plan.reconcile.clocks import without_operator

    ignored = without_operator(job.spec)
    if ignored:
        tell(f"warning: {', '.join(ignored)} has no effect without the operator")


def run_in_job(words: Sequence[str], job: str, place: tuple[str, str | None, str | None], *, detach: bool) -> int:
    """The exit code of the rank that failed first. `place`: cluster file, namespace, context."""
    from lockstep.platforms.jobs.devrun import agent_command, run_on_all_nodes

    found = find_job(job, *place)
    refuse(found)
    command = agent_command(words, _who(), detach=detach)
    return asyncio.run(run_on_all_nodes(place[2], found.namespace, job, command))


def refuse(found: Found) -> None:
    """Raises ConfigError where no node waits for what it is asked to run, with what to do about it."""
    from lockstep.api.objects import condition, is_true

    name, status = found.name, found.job.get("status") or {}
    if found.job["spec"].get("type") != "Interactive":
        raise ConfigError(f"job {name} is a Batch job, which runs what it was made for: scripts are run in one of type Interactive")
    if is_true(status, "Failed"):
        raise ConfigError(f"{name} has failed: {condition(status, 'Failed')['message']}: lockstep retry {name} -n {found.namespace}")
    stopped: dict[str, Any] = condition(status, "Suspended")
    if stopped.get("status") == "True" or stopped.get("reason") == "Stopping":
        raise ConfigError(f"{name} has no pods now: bring it back with lockstep resume {name} -n {found.namespace}")
    progress: dict[str, Any] = condition(status, "Progressing")
    if progress.get("status") == "False":
        raise ConfigError(f"{name} can't run anything now: {progress['message']}: lockstep why {name} -n {found.namespace}")


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name
        return socket.gethostname()
