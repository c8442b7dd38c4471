"""The pod of every node of a job."""

from __future__ import annotations

from collections import ChainMap
from posixpath import join
from typing import Any

from lockstep.api import names
from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.job import TrainingJobSpec
from lockstep.plan.render.fabric import GPU_RESOURCE, Transport, rail_resources
from lockstep.plan.render.metadata import pod_annotations, pod_labels
from lockstep.plan.render.resolve import Resolved
from lockstep.plan.render.scheduling import affinity, tolerations, topology_spread
from lockstep.plan.render.security import agent_security_context, pod_security_context, trainer_security_context
from lockstep.plan.render.storage import agent_mounts, mounts, pod_volumes
from lockstep.plan.render.template import fill
from lockstep.plan.render.variables import pod_variables, profile_variables

AGENT_COMMAND = ["python3", "-m", "lockstep_gang.package", names.AGENT_PATH]
# Stated for namespaces with a quota; free, because a pod counts the larger of its init and main containers.
AGENT_RESOURCES = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


def pod_template(resolved: Resolved, agent_image: str, key_secret: str, *, reports: bool) -> dict[str, Any]:
    """The pod template, without its frozen run's name; `reports` says whether there is an operator to report to, `key_secret` which Secret has the key."""
    spec, profile = resolved.job.spec, resolved.profile.spec
    extra = spec.pod_template
    return fill(
        "pod",
        labels=pod_labels(resolved),
        annotations=pod_annotations(resolved),
        service_account=profile.security.service_account,
        grace_seconds=extra.grace_seconds,
        pod_security=pod_security_context(profile),
        affinity=affinity(resolved.name, profile.nodes, resolved.platform.excluded_nodes),
        tolerations=tolerations(extra, profile.pod, resolved.gpus_per_node),
        node_selector=dict(ChainMap(extra.node_selector, profile.nodes.selector)),
        priority_class=extra.priority_class_name,
        scheduler=extra.scheduler_name,
        spread=topology_spread(resolved.name, extra),
        runtime_class=profile.pod.runtime_class_name if resolved.gpus_per_node else None,
        image_pull_secrets=[{"name": name} for name in pull_secrets(spec, profile)],
        agent_name=names.AGENT_CONTAINER,
        agent_image=agent_image,
        agent_command=AGENT_COMMAND,
        agent_resources=AGENT_RESOURCES,
        agent_security=agent_security_context(profile),
        agent_env=profile_variables(profile),
        agent_mounts=agent_mounts(resolved),
        trainer_name=names.CONTAINER,
        image=resolved.image,
        command=["python3", "-I", names.AGENT_PATH, "--run", join(names.RUN_FOLDER, names.RUN_KEY)],
        workspace=names.WORKSPACE,
        env=pod_variables(resolved),
        env_from=[variables.to_dict() for variables in spec.env_from],
        ports=[{"name": "coordinator", "containerPort": names.COORDINATOR_PORT}],
        resources=_resources(resolved),
        trainer_security=trainer_security_context(profile, resolved.transport),
        mounts=mounts(resolved, reports=reports),
        volumes=pod_volumes(resolved, key_secret, reports=reports),
    )


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
