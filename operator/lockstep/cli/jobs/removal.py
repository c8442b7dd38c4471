"""Files of jobs that `lockstep delete --files` removes with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError
from lockstep.api.names import WORKSPACE
from lockstep.api.objects import current_status, has_ended, is_true
from lockstep.cli.shared.terminal import confirm, say
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.cli.shared.site import SiteJob

REMOVE = "import os, shutil, sys; os.path.isdir(sys.argv[1]) and shutil.rmtree(sys.argv[1])"
REMOVE_SECONDS = 1800.0
"""A run of thousands of files on a slow volume."""


def places_of_files(jobs: Sequence[SiteJob], *, yes: bool) -> list[list[int]]:
    """Return the nodes of each job that have files, after a question.

    Raises:
        ConfigError: nobody can be asked; a job has no volumes, or may write.
        Failed: a host doesn't answer.
    """
    for one in jobs:
        _refuse_in_use(one)
    nodes = [one.nodes_with_volumes() for one in jobs]
    names = ", ".join(f"{_folder(one)} {one.site.where}" for one in jobs)
    if not yes:
        question = f"Remove {names}, with all checkpoints, logs and adapters? Nothing brings them back."
        confirm(question, f"--files removes {names} for good: use --yes to confirm it")
    return nodes


def remove_files(job: SiteJob, nodes: Sequence[int]) -> None:
    """Remove the job's folder from its volumes. Raises ConfigError if it goes on meanwhile, Failed for a volume that can't be reached: the rest stays."""
    _refuse_in_use(job.site.job(job.name))
    for node in nodes:
        asyncio.run(_remove(job, node))
    put(f"{_folder(job)} is removed", flush=True)


def _folder(job: SiteJob) -> str:
    return f"{WORKSPACE}/runs/{job.name}"


def _refuse_in_use(job: SiteJob) -> None:
    """Raise ConfigError for a job that may still write its files, or is about to."""
    status = current_status(job.job)
    if not (has_ended(status) or is_true(status, "Suspended")):
        raise ConfigError(f"job {job.name} may still write its files, so --files removes none: first lockstep stop {job.at}")


async def _remove(job: SiteJob, node: int) -> None:
    from lockstep.programs import output_of

    async with job.volume(node, say) as volume:
        await output_of(volume.place, [*volume.place.python, "-I", "-c", REMOVE, volume.run_folder(job.name)], seconds=REMOVE_SECONDS)
