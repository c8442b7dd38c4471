"""`lockstep retry JOB`: a failed job goes on from its last checkpoint, with a full budget of restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.jobs.run import LOCAL_CLUSTER, refuse_interactive
from lockstep.cli.shared.inputs import FRESH, OptionalFileOption, only, read_inputs
from lockstep.cli.shared.jobargs import UNNAMED, ContextOption, find_job
from lockstep.platforms.output import put


def retry(
    job: Annotated[str | None, typer.Argument(help="The job's name.", show_default=False)] = None,
    files: OptionalFileOption = None,
    local: Annotated[bool, typer.Option("--local", help="A run of `lockstep run --local`.")] = False,
    in_namespace: Annotated[bool, typer.Option("--in-namespace", help="A run of `lockstep run --in-namespace`.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help=f"The cluster file that names the namespace, and the API server that must answer. {UNNAMED}"),
    ] = None,
    namespace: Annotated[str | None, typer.Option("-n", "--namespace", help="Default: the cluster's.")] = None,
    context: ContextOption = None,
    workspace: Annotated[Path, typer.Option("--workspace", help="With --local: as `lockstep run` was told.")] = Path(".lockstep/workspace"),
) -> None:
    """Start a failed job again from its last checkpoint. What failed stays in its history.

    Example: lockstep retry demo
    """
    file = only(files, "retry") if files else None
    if file is not None and local != in_namespace and job is None:
        raise typer.Exit(_run_again(file, cluster, namespace, context, workspace if local else None))
    if job is None or file is not None or local or in_namespace:
        raise ConfigError("say which job failed: lockstep retry JOB, or -f FILE with either --local or --in-namespace")
    from lockstep.cli.shared.target import unnamed_cluster

    number = _raise_retry(job, cluster or unnamed_cluster(context), namespace, context)
    put(
        f"{job}: retry {number} goes on from its last checkpoint; see it with: lockstep logs {job} -f"
        + (f" -n {namespace}" if namespace else "")
    )


def _raise_retry(job: str, cluster: str, namespace: str | None, context: str | None) -> int:
    from lockstep.kube.jobs import patch_spec

    found = find_job(job, cluster, namespace, context)
    _refuse(job, found.job.get("status", {}))
    number = int(found.job["spec"].get("restart", {}).get("retry", 0)) + 1
    patch_spec(found.target.client, found.namespace, job, {"restart": {"retry": number}})
    return number


def _refuse(job: str, status: dict[str, object]) -> None:
    from lockstep.api.objects import condition, is_true

    if is_true(status, "Complete"):
        raise ConfigError(
            f"job {job} is complete: there is nothing to retry (lockstep describe {job}); to train anew: lockstep delete {job}, then lockstep render -f FILE --set {FRESH} -o job | kubectl apply -f -"
        )
    if not is_true(status, "Failed"):
        told = condition(status, "Progressing")
        state = f"{told['reason']}: {told['message']}" if told else "its status says nothing yet"
        raise ConfigError(f"job {job} has not failed, so there is nothing to retry: {state}")


def _run_again(file: Path, cluster: str | None, namespace: str | None, context: str | None, workspace: Path | None) -> int:
    """`workspace`: of a local run; None: in a namespace."""
    from lockstep.platforms.in_namespace.run import How, run_in_namespace
    from lockstep.platforms.local.retry import failed_run
    from lockstep.platforms.local.run import run_local

    inputs = read_inputs(file, cluster or (LOCAL_CLUSTER if workspace is not None else None), None if workspace is not None else namespace)
    refuse_interactive(inputs.job)
    if workspace is None:
        return run_in_namespace(inputs.job, inputs.cluster.profile, inputs.namespace, context, How.RETRY)
    return run_local(inputs.job, inputs.cluster.profile, workspace, failed_run(inputs.job.metadata.name, workspace))
