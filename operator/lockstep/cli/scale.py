"""`lockstep scale JOB --nodes N`: save, stop, and go on with another number of nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.jobargs import ClusterNameOption, ContextOption, JobArgument, NamespaceOption, find_job
from lockstep.platforms.output import put


def scale(
    job: JobArgument,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=1024, help="How many nodes it should have.")],
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Change a job's number of nodes: it saves, stops and goes on from there, with the same global batch.

    Example: lockstep scale demo --nodes 4
    """
    from lockstep.platforms.kubernetes.jobs import has_ended, patch_spec

    found = find_job(job, cluster, namespace, context)
    if has_ended(found.job.get("status", {})):
        raise ConfigError(f"job {job} has ended: give a new job the number of nodes it should have")
    before = found.job["spec"].get("nodes")
    if before == nodes:
        put(f"{job} has {nodes} nodes already")
        return
    patch_spec(found.target.client, found.namespace, job, {"nodes": nodes})
    put(
        f"{job}: {'the profile’s number of' if before is None else before} → {nodes} nodes; see it with: lockstep get {job} -n {found.namespace}"
    )
