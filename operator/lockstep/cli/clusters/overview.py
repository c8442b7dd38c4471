"""`lockstep cluster status`: the operator, the TrainingCluster, the dev environment and jobs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.api.objects import condition
from lockstep.cli.shared.clusterfiles import UnknownCluster
from lockstep.cli.shared.jobargs import OptionalClusterArgument, TargetOptions, acts_on
from lockstep.cli.shared.target import load
from lockstep.cli.shared.terminal import console
from lockstep.kube.cluster import Client, Cluster
from lockstep.plan.checks.doctor import differing_keys
from lockstep.plan.cluster.facts import Sight
from lockstep.plan.cluster.scope import EVERYWHERE, scope_of
from lockstep.plan.pages.table import of_total
from lockstep.platforms.clusters.facts import read_operator, read_profile
from lockstep.platforms.clusters.listings import list_kind, sight_of_jobs

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile

NOT_SEEN = "you may not look"


@acts_on("cluster", "context")
def status(where: TargetOptions, cluster: OptionalClusterArgument = "local") -> None:
    """Show the operator, the TrainingCluster and the jobs.

    The dev environment is among them. Exit code 1 when the operator isn't ready, or no job can be seen.

    Example: lockstep cluster status local
    """
    try:
        file = load(where.verb, cluster)
    except UnknownCluster as error:
        raise ConfigError(f"{error}; for a job: lockstep get {shlex.quote(cluster)}") from None

    if not Client(where.connections).run(lambda connection: _show(connection, file)):
        raise typer.Exit(1)


async def _show(cluster: Cluster, file: ClusterFile) -> bool:
    """Print the page. Return False where the operator isn't ready, or no job can be seen."""
    from rich.table import Table

    namespace = file.cluster.namespace
    jobs, operator = await list_kind(cluster, "TrainingJob", namespace), await read_operator(cluster, namespace)
    deployment, profile = operator.first, await _profile(cluster, file)
    no_jobs = f"none in namespace {namespace}" if jobs.seen else await _unseen_jobs(cluster, file)
    ready = int((deployment or {}).get("status", {}).get("readyReplicas", 0))
    state = "not installed" if deployment is None else f"{ready} of {deployment['spec']['replicas']} ready"
    home = OPERATOR_NAMESPACE if deployment is None else deployment["metadata"]["namespace"]
    scope, terminal = EVERYWHERE if deployment is None else scope_of(deployment), console()
    where = f"namespace {home}{f'; {scope.choice}' if scope.choice else ''}"
    terminal.print(f"operator   {state if operator.seen else NOT_SEEN} ({where})", highlight=False)
    terminal.print(f"cluster    {file.profile.metadata.name}: {profile}", highlight=False)
    table = Table("job", "nodes", "ranks", "step", "checkpoint", "state", "message", box=None, title=None)
    for job in jobs.items:
        table.add_row(*_row(job))
    terminal.print(table if jobs.items else f"jobs       {no_jobs}", highlight=False)
    return jobs.seen and (ready > 0 or not operator.seen)


async def _unseen_jobs(cluster: Cluster, file: ClusterFile) -> str:
    """Return the reason that no job is seen. An account without rights on a kind is refused before the API server looks whether it
    exists.
    """
    if await sight_of_jobs(cluster) is Sight.NO_SUCH_KIND:
        return f"this cluster doesn't know TrainingJobs: lockstep deploy {shlex.quote(file.cluster.name)}"
    return f"{NOT_SEEN} (namespace {file.cluster.namespace})"


async def _profile(cluster: Cluster, file: ClusterFile) -> str:
    listing = await read_profile(cluster, file.profile.metadata.name, file.cluster.namespace)
    if listing.first is None:
        return "not on the cluster" if listing.seen else NOT_SEEN
    mode = listing.first["spec"].get("network", {}).get("mode", "Auto")
    differs = differing_keys(file.profile.spec, listing.first)
    return f"installed, mode {mode}" + (f"; differs from its file in {', '.join(differs)}" if differs else "")


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    status = job.get("status", {})
    ranks, trainer = status.get("ranks", {}), status.get("trainer", {})
    summary = condition(status, "Progressing")
    return (
        job["metadata"]["name"],
        str(status.get("nodes", 0)),
        f"{ranks.get('ready', 0)}/{ranks.get('desired', 0)}",
        of_total(trainer.get("step"), trainer.get("totalSteps")),
        str(status.get("checkpoint", {}).get("lastCommittedStep", "-")),
        summary.get("reason", "Unknown"),
        summary.get("message", ""),
    )
