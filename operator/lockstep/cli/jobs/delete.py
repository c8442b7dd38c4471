"""`lockstep delete JOB`: the job and its pods go, its claims stay."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.shared.jobargs import UNNAMED, ContextOption, Found, NamespaceOption, find_jobs, known_names, no_such_job
from lockstep.platforms.output import put


def delete(
    jobs: Annotated[list[str] | None, typer.Argument(help="The jobs' names.", show_default=False, autocompletion=known_names)] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            show_default=False,
            help="The jobs of a job file, or of a folder of them, instead of names; - reads what is piped in. May be repeated.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            help=f"The cluster file that names the namespace, and the API server that must answer. Default: with -f the job's cluster, else as follows. {UNNAMED}",
        ),
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Delete jobs; a running one saves first. Claims, and with them checkpoints, stay: a job made again under its name goes on.

    Where one of them isn't there, none is deleted.

    Example: lockstep delete demo

    Example: lockstep delete -f jobs/
    """
    from lockstep.cli.shared.target import unnamed_cluster
    from lockstep.kube.jobs import delete_job, has_ended

    if bool(jobs) == bool(files):
        raise ConfigError(f"say which jobs: their names, or -f FILE{' and not both' if jobs else ''}")
    if files:
        found = _of_files(files, cluster, namespace, context)
    else:
        found = find_jobs(jobs or [], cluster or unnamed_cluster(context), namespace, context)
    running = [one.name for one in found if not has_ended(one.job.get("status", {})) and not one.job["spec"].get("suspend", False)]
    if running and not yes:
        listed, them = ", ".join(running), "it" if len(running) == 1 else "them"
        have = f"job {listed} has" if len(running) == 1 else f"jobs {listed} have"
        if not sys.stdin.isatty():
            raise ConfigError(f"{have} not ended: say --yes to delete {them} all the same")
        where = ", ".join(sorted({one.namespace for one in found}))
        typer.confirm(f"{have[0].upper()}{have[1:]} not ended (namespace {where}). Save, stop and delete {them}?", abort=True)
    for one in found:
        try:
            delete_job(one.target.client, one.namespace, one.name)
        except TimeoutError as error:
            raise Failed(str(error)) from error
        put(f"{one.name} is deleted; its claims stay", flush=True)


def _of_files(files: list[Path], cluster: str | None, namespace: str | None, context: str | None) -> list[Found]:
    """Each job once. Raises ConfigError for a mistake in any file, for the wrong cluster, and for a job that isn't there."""
    from lockstep.cli.shared.inputs import read_all
    from lockstep.cli.shared.target import Target, unnamed_cluster
    from lockstep.kube.cluster import Client
    from lockstep.kube.jobs import get_job

    found: dict[tuple[str, str], Found] = {}
    for inputs in read_all(files, cluster, namespace, unnamed=lambda: unnamed_cluster(context)):
        inputs.aim()
        target, name = Target(Client(context), inputs.namespace, inputs.cluster.cluster.name), inputs.job.metadata.name
        job = get_job(target.client, inputs.namespace, name)
        if job is None:
            raise ConfigError(f"{inputs.source}: {no_such_job(target, name)}")
        found[inputs.namespace, name] = Found(target, job)
    return list(found.values())
