"""`lockstep run -f job.yaml --local`: the same job file without the operator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.inputs import FileOption, NamespaceOption, SetOption, read_inputs

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob

LOCAL_CLUSTER = "local"


def run(
    file: FileOption,
    local: Annotated[bool, typer.Option("--local", help="As processes of this machine: no cluster, no root.")] = False,
    in_namespace: Annotated[
        bool, typer.Option("--in-namespace", help="On Kubernetes with the role admin in one namespace: no CRD, no operator.")
    ] = False,
    namespace: NamespaceOption = None,
    context: Annotated[str | None, typer.Option("--context", help="Of the kubeconfig, with --in-namespace.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A cluster of clusters/, or a cluster file's path. Default with --local: local.")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, max=64, help="Instead of the job's.")] = None,
    changes: SetOption = None,
    workspace: Annotated[
        Path, typer.Option("--workspace", help="With --local: its folders workspace/ and datasets/ stand for /workspace and /datasets.")
    ] = Path(".lockstep/workspace"),
) -> None:
    """Run a job to its end and follow its log. Exit code 0: complete, 1: failed, 2: it can't run as written, 130: interrupted.

    Example: lockstep run -f job.yaml --local --set training.lora.rank=8 --set nodes=1
    """
    if local == in_namespace:
        raise ConfigError("say where the job should run: --local (processes of this machine) or --in-namespace (Kubernetes, role admin)")
    if in_namespace:
        raise typer.Exit(_run_in_namespace(file, cluster, namespace, context, changes))
    raise typer.Exit(_run_local(file, cluster or LOCAL_CLUSTER, nodes, workspace, changes))


def _run_in_namespace(file: Path, cluster: str | None, namespace: str | None, context: str | None, changes: list[str] | None) -> int:
    from lockstep.platforms.kubernetes.in_namespace import run_in_namespace

    inputs = read_inputs(file, cluster, namespace, changes)
    _warn(inputs.job)
    return run_in_namespace(inputs.job, inputs.cluster.profile, inputs.namespace, context)


def _run_local(file: Path, cluster: str, nodes: int | None, workspace: Path, changes: list[str] | None) -> int:
    from lockstep.platforms.local.run import run_local

    inputs = read_inputs(file, cluster, None, changes)
    _warn(inputs.job)
    job = inputs.job
    if nodes is not None:
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"nodes": nodes})})
    return run_local(job, inputs.cluster.profile, workspace)


def _warn(job: TrainingJob) -> None:
    from lockstep.plan.lifetime import without_operator

    ignored = without_operator(job.spec)
    if ignored:
        print(f"warning: {', '.join(ignored)} has no effect without the operator", file=sys.stderr)
