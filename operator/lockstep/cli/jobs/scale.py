"""`lockstep scale JOB NODES`: save, stop, and go on with another number of nodes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.jobargs import ClusterNameOption, ContextOption, Found, JobArgument, NamespaceOption, find_job
from lockstep.platforms.output import put
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from lockstep.kube.cluster import Cluster

NODES_MAX = 1024


def scale(
    job: JobArgument,
    number: Annotated[int | None, typer.Argument(metavar="NODES", min=1, max=NODES_MAX, help="How many nodes it should have.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, max=NODES_MAX, help="The same.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask, also where the job would wait for nodes.")] = False,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Change a job's number of nodes: it saves, stops and goes on from there, with the same global batch. Asks first where too few nodes have room.

    Example: lockstep scale demo 4
    """
    from lockstep.kube.jobs import has_ended, patch_spec

    if (number is None) == (nodes is None):
        raise ConfigError("say how many nodes the job should have, once: lockstep scale JOB 4")
    wanted = number or nodes or 0
    found = find_job(job, cluster, namespace, context)
    if has_ended(found.job.get("status", {})):
        raise ConfigError(f"job {job} has ended: give a new job the number of nodes it should have")
    before = found.job["spec"].get("nodes")
    if before == wanted:
        put(f"{job} has {number_of(wanted, 'node')} already")
        return
    _ask(found, wanted, yes=yes)
    patch_spec(found.target.client, found.namespace, job, {"nodes": wanted})
    was = "the cluster's number of nodes" if before is None else before
    put(f"{job}: {was} → {number_of(wanted, 'node')}; see it with: lockstep get {job} -n {found.namespace}")


def _ask(found: Found, wanted: int, *, yes: bool) -> None:
    """Raises ConfigError where nobody can be asked; typer's Abort when the answer is no."""
    from lockstep_gang.contract import printable_line

    lacking = "" if yes else found.target.client.run(lambda cluster: _lacking(cluster, found, wanted))
    if not lacking:
        return
    said = f"{lacking}: {found.name} would stop and wait for them."
    if not sys.stdin.isatty():
        raise ConfigError(f"{said} Say --yes to scale it all the same")
    typer.confirm(printable_line(f"{said} Scale it all the same?"), abort=True)


async def _lacking(cluster: Cluster, found: Found, wanted: int) -> str:
    """Why too few nodes have room now; '' where enough have, or where the account may not look, or nothing says what a pod asks for."""
    from lockstep.plan.cluster.finding import Outcome
    from lockstep.plan.cluster.fitting import room
    from lockstep.platforms.clusters.facts import room_facts

    stateful_set = await cluster.get("StatefulSet", found.namespace, found.name)
    if stateful_set is None:
        return ""
    findings = room(stateful_set["spec"]["template"], wanted, await room_facts(cluster, found.namespace, found.name))
    return next((one.message for one in findings if one.outcome is Outcome.WAITS), "")
