"""`lockstep cp SRC DST`: copy files between this machine and a job's volumes."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.inputs import only, read_inputs
from lockstep.cli.shared.jobargs import TargetOptions, on_cluster
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.platforms.files.copies import CopyWish, read_all, there


@on_cluster
def cp(
    where: TargetOptions,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC...", help="Files or folders: of this machine, or JOB:/path on a job's volumes.", show_default=False),
    ],
    target: Annotated[
        str, typer.Argument(help="The target: JOB:/path, or a path of this machine. With a / at the end it is a folder to copy into.")
    ],
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="The job file of a job that has never started. It says which volumes the job will have.",
            show_default=False,
        ),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(
            "--node",
            min=0,
            help="The node whose volume is used. Default: every node's when copying to a job, node 0's when copying from it.",
        ),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="HOST",
            help="On hosts: the host that has SRC, and sends it to all others. This machine sends nothing.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that were sent from another folder.")] = False,
) -> None:
    """Copy files to or from a job's volumes.

    You can resume a copy. Every file is verified by SHA-256, and arrives whole or not at all.

    The target is the new name. With a / at its end it is a folder to copy into; `SRC/.` means the content of a folder. If a copy breaks,
    run the same command again to continue.

    A file that was sent from another folder, and differs, is not replaced without --force.

    If every pod has its own volumes, files go to all of them at once. If the job has no pods, a short-lived pod without GPUs mounts the
    volumes. On hosts (--cluster names a file of hosts) files go to the first host, and from host to host; this works before the job's
    first start, too.

    Example: lockstep cp models/llama demo:/datasets/models/

    Example: lockstep cp train.py config.json src/. demo:/workspace/

    Example: lockstep cp -f job.yaml train.py mine:
    """
    file = only(files, "cp") if files else None
    copies = read_all(sources, target) if origin is None else there(sources, target)
    if force and not copies[0].up:
        raise ConfigError("--force replaces files of a job, and these are copied from it: leave it out")
    wish = CopyWish(node, origin, force)
    if file is not None:
        inputs = read_inputs(file, where)
        name = inputs.job.metadata.name
        if other := next((copy.remote.job for copy in copies if copy.remote.job != name), ""):
            raise ConfigError(f"{file} is job {name}, and not {other}: lockstep cp -f {shlex.quote(str(file))} SRC {name}:")
        where, wish = inputs.at(where), replace(wish, job=inputs.job, cluster=inputs.cluster)
    backend = where.backend()
    with exiting_on_ctrl_c("interrupted: what has arrived is kept; run the same command again to continue"):
        done = [asyncio.run(backend.copy(copy, wish)) for copy in copies]
    if not all(done):
        raise typer.Exit(1)
