"""What `lockstep status` shows of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE

if TYPE_CHECKING:
    from lockstep.api.clusterfile import ClusterFile
    from lockstep.platforms.kubernetes.cluster import Cluster

NOT_FOUND = 404


@dataclass(frozen=True)
class Overview:
    """The operator, the profile on the cluster and the jobs of its namespace, as the API server has them."""

    namespace: str
    operator: str
    operator_ready: bool
    profile: str
    jobs: list[dict[str, Any]]


async def overview(cluster: Cluster, found: ClusterFile) -> Overview:
    from lockstep.platforms.kubernetes.cluster import ApiError

    deployment = await cluster.get("Deployment", OPERATOR_NAMESPACE, OPERATOR_NAME)
    ready = (deployment or {}).get("status", {}).get("readyReplicas", 0)
    try:
        profile = await cluster.get("ClusterProfile", None, found.profile.metadata.name)
        jobs = (await cluster.list("TrainingJob", found.cluster.namespace))["items"]
    except ApiError as error:
        if error.status != NOT_FOUND:  # no CRDs yet
            raise
        profile, jobs = None, []
    return Overview(
        namespace=found.cluster.namespace,
        operator="not installed" if deployment is None else f"{ready} of {deployment['spec']['replicas']} ready",
        operator_ready=ready > 0,
        profile=f"{found.profile.metadata.name}: {_profile_state(profile, found)}",
        jobs=jobs,
    )


def _profile_state(profile: dict[str, Any] | None, found: ClusterFile) -> str:
    if profile is None:
        return "not on the cluster"
    mine = found.profile.spec.to_dict()
    mode = profile["spec"].get("network", {}).get("mode", "Auto")
    mine["network"]["mode"] = mode
    differs = sorted(key for key, value in mine.items() if profile["spec"].get(key) != value)
    return f"installed, mode {mode}" + (f"; differs from its file in {', '.join(differs)}" if differs else "")


def print_overview(seen: Overview) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"operator   {seen.operator} (namespace {OPERATOR_NAMESPACE})", highlight=False)
    console.print(f"profile    {seen.profile}", highlight=False)
    if not seen.jobs:
        console.print(f"jobs       none in namespace {seen.namespace}", highlight=False)
        return
    table = Table("job", "nodes", "ranks", "step", "checkpoint", "state", "message", box=None, title=None)
    for job in seen.jobs:
        table.add_row(*_row(job))
    console.print(table)


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    status = job.get("status", {})
    ranks, trainer = status.get("ranks", {}), status.get("trainer", {})
    from lockstep.plan.readstatus import condition

    summary = condition(status, "Progressing")
    return (
        job["metadata"]["name"],
        str(status.get("nodes", 0)),
        f"{ranks.get('ready', 0)}/{ranks.get('desired', 0)}",
        f"{trainer.get('step', '-')}/{trainer.get('totalSteps', '-')}",
        str(status.get("checkpoint", {}).get("lastCommittedStep", "-")),
        summary.get("reason", "Unknown"),
        summary.get("message", ""),
    )
