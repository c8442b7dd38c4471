"""Files of jobs that `lockstep delete --files` removes with them: all can be reached and no job writes, or nothing is removed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError
from lockstep.api.names import WORKSPACE
from lockstep.api.objects import current_status, has_ended, is_true
from lockstep.cli.shared.terminal import confirm, say
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.cli.shared.site import SiteJob, Volume

REMOVE = "import os, shutil, sys; os.path.isdir(sys.argv[1]) and shutil.rmtree(sys.argv[1])"
REMOVE_SECONDS = 1800.0
"""A run of thousands of files on a slow volume."""


def refuse_files_in_use(jobs: Sequence[SiteJob]) -> None:
    """Raise ConfigError for a job that may still write its files, or is about to."""
    for one in jobs:
        status = current_status(one.job)
        is_stopped = is_true(status, "Suspended") and one.job["spec"].get("suspend", True)
        if not (has_ended(status) or is_stopped):
            raise ConfigError(f"job {one.name} may still write its files, so --files removes none: first lockstep stop {one.at}")


def remove_files(jobs: Sequence[SiteJob], *, yes: bool) -> None:
    """Remove the jobs' folders on all volumes, after a question.

    Raises:
        ConfigError: nobody can be asked; a job has no volumes, or may write.
        Failed: a volume can't be reached. Then nothing was removed.
    """
    nodes = [one.nodes_with_volumes() for one in jobs]
    names = ", ".join(f"{_folder(one)} {one.site.where}" for one in jobs)
    if not yes:
        question = f"Remove {names}, with all checkpoints, logs and adapters? Nothing brings them back."
        confirm(question, f"--files removes {names} for good: use --yes to confirm it")
    asyncio.run(_remove(list(zip(jobs, nodes, strict=True))))


def _folder(job: SiteJob) -> str:
    return f"{WORKSPACE}/runs/{job.name}"


async def _remove(jobs: list[tuple[SiteJob, list[int]]]) -> None:
    async with AsyncExitStack() as stack:
        volumes = [(job, [await stack.enter_async_context(job.volume(node, say)) for node in nodes]) for job, nodes in jobs]
        for job, _ in jobs:  # (somebody may have resumed it since)
            refuse_files_in_use([await asyncio.to_thread(job.site.job, job.name)])
        for job, places in volumes:
            for volume in places:
                await _remove_run(volume, job.name)
            put(f"{_folder(job)} is removed", flush=True)


async def _remove_run(volume: Volume, job: str) -> None:
    from lockstep.programs import output_of

    await output_of(volume.place, [*volume.place.python, "-I", "-c", REMOVE, volume.run_folder(job)], seconds=REMOVE_SECONDS)
