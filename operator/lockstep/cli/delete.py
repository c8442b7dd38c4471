"""`lockstep delete JOB`: the job and its pods go, its claims stay."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.jobargs import ClusterNameOption, ContextOption, JobsArgument, NamespaceOption, find_jobs
from lockstep.platforms.output import put


def delete(
    jobs: JobsArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Delete jobs; a running one saves first. Claims, and with them checkpoints, stay: a job made again under its name goes on.

    Example: lockstep delete demo
    """
    from lockstep.platforms.kubernetes.jobs import delete_job, has_ended

    found = find_jobs(jobs, cluster, namespace, context)
    running = [one.name for one in found if not has_ended(one.job.get("status", {})) and not one.job["spec"].get("suspend", False)]
    if running and not yes:
        listed, them = ", ".join(running), "it" if len(running) == 1 else "them"
        have = f"job {listed} has" if len(running) == 1 else f"jobs {listed} have"
        if not sys.stdin.isatty():
            raise ConfigError(f"{have} not ended: say --yes to delete {them} all the same")
        typer.confirm(f"{have[0].upper()}{have[1:]} not ended (namespace {found[0].namespace}). Save, stop and delete {them}?", abort=True)
    for one in found:
        try:
            delete_job(one.target.client, one.namespace, one.name)
        except TimeoutError as error:
            raise Failed(str(error)) from error
        put(f"{one.name} is deleted; its claims stay", flush=True)
