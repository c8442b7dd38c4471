"""What verbs about a job read: the job file, the cluster file, and both resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.platforms.output import tell

if TYPE_CHECKING:
    from lockstep.api.clusterfile import ClusterFile
    from lockstep.api.job import TrainingJob
    from lockstep.plan.resolve import Resolved

FileOption = Annotated[Path, typer.Option("-f", "--file", help="The job file; - reads what is piped in.", show_default=False)]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="A cluster of clusters/, or a cluster file's path. Default: the job's clusterProfileName.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="A field of the job, instead of the file's: training.lora.rank=8, nodes=1. May be repeated."
    ),
]
NamespaceOption = Annotated[str | None, typer.Option("-n", "--namespace", help="Default: the job's, else the cluster's.")]


@dataclass(frozen=True)
class Inputs:
    """A job and the cluster that it is for, as their files say."""

    job: TrainingJob
    cluster: ClusterFile
    namespace: str


def read_inputs(file: Path, cluster: str | None, namespace: str | None, changes: Sequence[str] | None = None) -> Inputs:
    """Raises ConfigError with every mistake of the job file, of `changes` (--set), or of the cluster file, or when they name no cluster."""
    from lockstep.api.jobfile import parse_job_file
    from lockstep.cli.clusters import read_text

    job = parse_job_file(read_text(file), str(file), changes or ())
    found = _read_cluster(job, file, cluster)
    stated = job.metadata.namespace
    if namespace and stated and namespace != stated:
        raise ConfigError(f"{file}: metadata.namespace is {stated}, but --namespace is {namespace}: remove one of them")
    return Inputs(job, found, namespace or stated or found.cluster.namespace)


def _read_cluster(job: TrainingJob, file: Path, cluster: str | None) -> ClusterFile:
    from lockstep.cli.clusters import cluster_names, load_cluster
    from lockstep.cli.paths import checkout

    stated = job.spec.cluster_profile_name
    if cluster is None and stated is None:
        known = ", ".join(cluster_names(checkout() / "clusters"))
        raise ConfigError(f"{file}: spec.clusterProfileName is not set: set it or say --cluster; known are {known}")
    name = cluster or stated or ""
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    found = load_cluster(name, Path() if is_path else checkout() / "clusters")
    if stated is not None and stated != found.cluster.name:
        warn("OtherProfile", f"{file} names the profile {stated}: that one counts once the job is on a cluster, not {found.cluster.name}")
    return found


def resolve_inputs(inputs: Inputs) -> Resolved:
    """The resolved job; its warnings go to stderr. Raises Refused (a ConfigError) with every reason against it."""
    from lockstep.plan.resolve import PlatformDefaults, resolve

    resolved = resolve(inputs.job, inputs.cluster.profile, PlatformDefaults(namespace=inputs.namespace))
    for warning in resolved.warnings:
        warn(warning.reason, warning.message)
    return resolved


def warn(reason: str, message: str) -> None:
    tell(f"warning: {reason}: {message}")
