"""A job resolved for the cluster of its file, and what a person should know of that."""

from __future__ import annotations

from dataclasses import replace

from lockstep.api.files.clusterfile import ClusterFile
from lockstep.api.job import TrainingJob
from lockstep.plan.ahead.standin import is_stand_in
from lockstep.plan.render.resolve import MORE_GPUS, refuse_missing_hosts, resolve
from lockstep.plan.render.resolved import MADE_BY_OPERATOR, PlatformDefaults, Resolved
from lockstep.platforms.output import tell


def resolve_with_warnings(job: TrainingJob, cluster: ClusterFile, namespace: str, *, quiet: bool = False) -> Resolved:
    """Return the resolved job; its warnings go to stderr, unless `quiet`. Raises Refused (a ConfigError) with every reason against it."""
    defaults = PlatformDefaults(namespace=namespace, image=MADE_BY_OPERATOR)  # the operator knows where its own image lies
    resolved = resolve(job, cluster.profile, defaults)
    if cluster.hosts is not None:
        refuse_missing_hosts(resolved, cluster.hosts)
        first = cluster.hosts.hosts[0]
        there = resolve(job, cluster.profile, replace(defaults, workspace=first.workspace, datasets=first.datasets))
        warnings = tuple(one for one in there.warnings if one.reason != MORE_GPUS)
        resolved = replace(resolved, warnings=warnings, settings=there.settings)
        if job.spec.image is not None and not quiet:
            warn("NoImageOnHosts", f"spec.image has no effect on {cluster.cluster.name}: hosts run no image")
    for warning in () if quiet else resolved.warnings:
        if not (is_stand_in(resolved) and warning.reason == "NoRails"):  # (which rails there are only a cluster says)
            warn(warning.reason, warning.message)
    return resolved


def warn(reason: str, message: str) -> None:
    tell(f"warning: {reason}: {message}")
