"""`lockstep sync JOB [FOLDER]`: send code from this machine to the pods of a job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from lockstep.api.names import DEV_ENVIRONMENT
from lockstep.cli.shared.jobargs import TargetOptions, known_names, on_cluster
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.platforms.files.sending import Sending


@on_cluster
def sync(
    where: TargetOptions,
    job: Annotated[str, typer.Argument(help="The job's name.", autocompletion=known_names)] = DEV_ENVIRONMENT,
    folder: Annotated[Path, typer.Argument(help="The folder to send.")] = Path("workspace"),
    to: Annotated[str, typer.Option("--to", help="The target folder in the pods.")] = "/workspace",
    watch: Annotated[bool, typer.Option("--watch", help="Keep sending changes until Ctrl-C.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Overwrite files that were changed in a pod since the last sync or sent from other folders, and remove those."
        ),
    ] = False,
) -> None:
    """Send a folder to all pods of a job: only what differs.

    It removes there what an earlier sync sent and you have deleted here, and nothing else.

    A volume that all pods share gets each file once. `.lockstepignore` in the folder says what stays here, or else `.gitignore` does.

    If another folder sent one of the files, and it differs, nothing is sent: give this folder one of its own with --to.

    Example: lockstep sync ml-dev-env workspace --watch
    """
    backend = where.backend()
    with exiting_on_ctrl_c():
        complete = asyncio.run(backend.sync(Sending(job, folder, to, backend.words.again, force=force, watch=watch)))
    if not complete:
        raise typer.Exit(1)
