"""`lockstep cluster status`: the operator, the TrainingCluster, the dev environment and the jobs of a cluster."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.cli.shared.jobargs import OptionalClusterArgument, TargetOptions, acts_on

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.kube.cluster import Cluster

NOT_SEEN = "you may not look"


@dataclass(frozen=True)
class Overview:
    """The operator, the TrainingCluster on the cluster and the jobs of its namespace, as the API server has them."""

    home: str
    """The operator's namespace."""
    operator: str
    operator_ready: bool | None
    """None: it is not for this person to see."""
    profile: str
    scope: str
    """Option that names where the operator works; '' for the whole cluster."""
    jobs: list[dict[str, Any]]
    jobs_seen: bool
    no_jobs: str
    """Reason that none are shown."""


@acts_on("cluster", "context")
def status(where: TargetOptions, cluster: OptionalClusterArgument = "local") -> None:
    """Show the operator, the TrainingCluster and the jobs.

    The dev environment is among them. Exit code 1 when the operator isn't ready, or no job can be seen.

    Example: lockstep cluster status local
    """
    from lockstep.cli.shared.clusterfiles import UnknownCluster
    from lockstep.cli.shared.target import load
    from lockstep.kube.cluster import Cluster

    try:
        file = load(where.verb, cluster)
    except UnknownCluster as error:
        raise ConfigError(f"{error}; for a job: lockstep get {shlex.quote(cluster)}") from None

    async def read() -> Overview:
        async with await Cluster.connect(where.connections) as connection:
            return await overview(connection, file)

    view = asyncio.run(read())
    print_overview(view)
    if view.operator_ready is False or not view.jobs_seen:
        raise typer.Exit(1)


async def overview(cluster: Cluster, file: ClusterFile) -> Overview:
    from lockstep.platforms.clusters.facts import read_operator
    from lockstep.platforms.clusters.listings import list_kind

    jobs = await list_kind(cluster, "TrainingJob", file.cluster.namespace)
    operator = await read_operator(cluster, file.cluster.namespace)
    deployment = operator.first
    ready = int((deployment or {}).get("status", {}).get("readyReplicas", 0))
    state = "not installed" if deployment is None else f"{ready} of {deployment['spec']['replicas']} ready"
    return Overview(
        home=OPERATOR_NAMESPACE if deployment is None else str(deployment["metadata"]["namespace"]),
        operator=state if operator.seen else NOT_SEEN,
        operator_ready=ready > 0 if operator.seen else None,
        profile=f"{file.profile.metadata.name}: {await _profile(cluster, file)}",
        scope=_scope_words(deployment),
        jobs=list(jobs.items),
        jobs_seen=jobs.seen,
        no_jobs=f"none in namespace {file.cluster.namespace}" if jobs.seen else await _unseen_jobs(cluster, file),
    )


async def _unseen_jobs(cluster: Cluster, file: ClusterFile) -> str:
    """Return the reason that no job is seen. An account without rights on a kind is refused before the API server looks whether it
    exists.
    """
    from lockstep.plan.cluster.facts import Sight
    from lockstep.platforms.clusters.listings import sight_of_jobs

    if await sight_of_jobs(cluster) is Sight.NO_SUCH_KIND:
        return f"this cluster doesn't know TrainingJobs: lockstep deploy {shlex.quote(file.cluster.name)}"
    return f"{NOT_SEEN} (namespace {file.cluster.namespace})"


def _scope_words(deployment: dict[str, Any] | None) -> str:
    from lockstep.plan.cluster.scope import scope_of

    scope = None if deployment is None else scope_of(deployment)
    return f"; {scope.choice}" if scope is not None and scope.choice else ""


async def _profile(cluster: Cluster, file: ClusterFile) -> str:
    from lockstep.plan.checks.doctor import differing_keys
    from lockstep.platforms.clusters.facts import read_profile

    listing = await read_profile(cluster, file.profile.metadata.name, file.cluster.namespace)
    if listing.first is None:
        return "not on the cluster" if listing.seen else NOT_SEEN
    mode = listing.first["spec"].get("network", {}).get("mode", "Auto")
    differs = differing_keys(file.profile.spec, listing.first)
    return f"installed, mode {mode}" + (f"; differs from its file in {', '.join(differs)}" if differs else "")


def print_overview(view: Overview) -> None:
    from rich.table import Table

    from lockstep.cli.shared.terminal import console

    terminal = console()
    terminal.print(f"operator   {view.operator} (namespace {view.home}{view.scope})", highlight=False)
    terminal.print(f"cluster    {view.profile}", highlight=False)
    if not view.jobs:
        terminal.print(f"jobs       {view.no_jobs}", highlight=False)
        return
    table = Table("job", "nodes", "ranks", "step", "checkpoint", "state", "message", box=None, title=None)
    for job in view.jobs:
        table.add_row(*_row(job))
    terminal.print(table)


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    status = job.get("status", {})
    ranks, trainer = status.get("ranks", {}), status.get("trainer", {})
    from lockstep.api.objects import condition
    from lockstep.plan.pages.table import of_total

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
