"""The pod of every node of a job."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import asdict
from typing import Any

from lockstep.api import names
from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.job import JobType, TrainingJobSpec
from lockstep.plan.render.fabric import GPU_RESOURCE, Transport, rail_networks, rail_resources
from lockstep.plan.render.resolved import Resolved
from lockstep.plan.render.scheduling import node_terms, tolerations
from lockstep.plan.render.security import restricted, trainer_rights, volume_group
from lockstep.plan.render.storage import claim_volumes, cluster_mounts, extra_volumes, mounts
from lockstep.plan.render.template import fill
from lockstep.plan.render.variables import pod_variables, profile_variables

# Stated for namespaces with a quota; free, because a pod counts the larger of its init and main containers.
AGENT_RESOURCES = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


def pod_template(resolved: Resolved, agent_image: str, key_secret: str, *, reports: bool) -> dict[str, Any]:
    """Return the pod template, without its frozen run's name.

    `reports`: there is an operator to report to. `key_secret`: name of the Secret with the agents' key.
    """
    spec, profile = resolved.job.spec, resolved.profile.spec
    extra = spec.pod_template
    return fill(
        "pod",
        job=resolved.name,
        labels=pod_labels(resolved),
        annotations=pod_annotations(resolved),
        service_account=profile.security.service_account,
        grace_seconds=extra.grace_seconds,
        volume_group=volume_group(profile),
        node_selector=dict(ChainMap(extra.node_selector, profile.nodes.selector)),
        rack_labels=[label for label in (profile.nodes.rack_label,) if label is not None],
        node_terms=node_terms(profile.nodes, resolved.platform.excluded_nodes),
        tolerations=tolerations(extra, profile.pod, resolved.gpus_per_node),
        spread=[constraint.to_dict() for constraint in extra.topology_spread_constraints],
        priority_class=extra.priority_class_name,
        runtime_class=profile.pod.runtime_class_name if resolved.gpus_per_node else None,
        scheduler=extra.scheduler_name,
        image_pull_secrets=pull_secrets(spec, profile),
        agent={
            "image": agent_image,
            "env": profile_variables(profile),
            "resources": AGENT_RESOURCES,
            "rights": asdict(restricted(profile)),
            "mounts": cluster_mounts(resolved),
        },
        trainer={
            "image": resolved.image,
            "env": pod_variables(resolved),
            "env_from": [variables.to_dict() for variables in spec.env_from],
            "resources": _resources(resolved),
            "rights": asdict(trainer_rights(profile, resolved.transport)),
            "mounts": mounts(resolved, reports=reports),
        },
        key_secret=key_secret,
        shm_size=profile.shm_size,
        report_audiences=[names.REPORT_AUDIENCE] if reports else [],
        claims=claim_volumes(resolved),
        extra_volumes=extra_volumes(resolved),
    )


def pod_labels(resolved: Resolved) -> dict[str, str]:
    return {**resolved.job.spec.pod_template.labels, **app_labels(resolved), **names.job_labels(resolved.name)}


def app_labels(resolved: Resolved) -> dict[str, str]:
    """Labels by which people select the pods and the claims of a dev environment."""
    is_interactive = resolved.job.spec.type is JobType.INTERACTIVE
    return {names.LABEL_APP: names.app_label(resolved.name)} if is_interactive else {}


def pod_annotations(resolved: Resolved) -> dict[str, str]:
    """The job's own, which container kubectl means where nobody says, and for RDMA the networks that Multus attaches."""
    own = {names.ANNOTATION_DEFAULT_CONTAINER: names.CONTAINER, **resolved.job.spec.pod_template.annotations}
    rdma = resolved.profile.spec.network.rdma
    if resolved.transport is not Transport.RDMA or not rdma.networks:
        return dict(own)
    return {**own, names.ANNOTATION_NETWORKS: rail_networks(rdma)}


def pull_secrets(spec: TrainingJobSpec, profile: TrainingClusterSpec) -> list[str]:
    """Names of the job's Secrets with registry logins, then of the cluster's; each once."""
    return list(dict.fromkeys([*(secret.name for secret in spec.image_pull_secrets), *profile.pod.image_pull_secrets]))


def _resources(resolved: Resolved) -> dict[str, dict[str, str]]:
    """CPU and memory as the cluster says; devices as requests and limits alike, as Kubernetes wants extended resources."""
    stated = resolved.profile.spec.resources
    devices = {GPU_RESOURCE: str(resolved.gpus_per_node)} if resolved.gpus_per_node else {}
    if resolved.transport is Transport.RDMA:
        devices |= rail_resources(resolved.profile.spec.network.rdma)
    return {"requests": stated.requests.to_dict() | devices, "limits": stated.limits.to_dict() | devices}
