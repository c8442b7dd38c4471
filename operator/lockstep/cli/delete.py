"""`lockstep delete JOB`: the job and its pods go, its claims stay."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.jobargs import ClusterNameOption, ContextOption, JobArgument, NamespaceOption, find_job
from lockstep.platforms.output import put


def delete(
    job: JobArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Delete a job; a running one saves first. Claims, and with them its checkpoints, stay: a job made again under its name goes on.

    Example: lockstep delete demo
    """
    from lockstep.platforms.kubernetes.jobs import delete_job, has_ended

    found = find_job(job, cluster, namespace, context)
    runs = not has_ended(found.job.get("status", {})) and not found.job["spec"].get("suspend", False)
    if runs and not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"job {job} has not ended: say --yes to delete it all the same")
        typer.confirm(f"Job {job} of namespace {found.namespace} has not ended. Save, stop and delete it?", abort=True)
    try:
        delete_job(found.target.client, found.namespace, job)
    except TimeoutError as error:
        raise Failed(str(error)) from error
    put(f"{job} is deleted; its claims stay")
