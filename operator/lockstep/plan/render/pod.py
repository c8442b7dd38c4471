"""The pod of every node of a job, and its variables, as `kubectl exec` sees them too."""

from __future__ import annotations

from collections import ChainMap
from typing import Any

from lockstep.api import names
from lockstep.api.cluster import TrainingCluster, TrainingClusterSpec
from lockstep.api.job import JobType, TrainingJob
from lockstep.api.shared import is_loaders
from lockstep.api.training import Training
from lockstep.plan.layers import Notice
from lockstep.plan.render.fabric import GPU_RESOURCE, Transport, rail_networks, rail_resources
from lockstep.plan.render.machine import rank_variables
from lockstep.plan.render.resolved import Resolved
from lockstep.plan.render.scheduling import node_terms, tolerations
from lockstep.plan.render.security import agent_context, locks_memory_as_root, trainer_context, volume_group
from lockstep.plan.render.storage import claim_volumes, cluster_mounts, extra_volumes, mounts
from lockstep.plan.render.template import fill
from lockstep_gang.contract.run import POD_IPS

# Stated for namespaces with a quota; free, because a pod counts the larger of its init and main containers.
AGENT_RESOURCES = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}
_INDEX = {"fieldRef": {"fieldPath": f"metadata.labels['{names.LABEL_POD_INDEX}']"}}
HUB_TOKEN = "HF_TOKEN"  # noqa: S105 (the variable's name)
OWN_VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "GPUS_PER_NODE", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
)  # fmt: skip
"""Set by Lockstep: a job or cluster that sets them too would only mislead shells, ranks get the agent's."""


def pod_template(resolved: Resolved, agent_image: str, key_secret: str, *, reports: bool) -> dict[str, Any]:
    """Return the pod template, without its frozen run's name.

    `reports`: there is an operator to report to. `key_secret`: name of the Secret with the agents' key.
    """
    spec, profile = resolved.job.spec, resolved.profile.spec
    pods_of_job = {"matchLabels": {names.LABEL_JOB: resolved.name}}
    extra, own_logins = spec.pod_template, (secret.name for secret in spec.image_pull_secrets)
    return fill(
        "pod",
        pods_of_job=pods_of_job,
        labels=pod_labels(resolved),
        annotations=pod_annotations(resolved),
        service_account=profile.security.service_account,
        grace_seconds=extra.grace_seconds,
        volume_group=volume_group(profile),
        node_selector=dict(ChainMap(extra.node_selector, profile.nodes.selector)),
        rack_labels=[label for label in (profile.nodes.rack_label,) if label is not None],
        node_terms=node_terms(profile.nodes, resolved.platform.excluded_nodes),
        tolerations=tolerations(extra, profile.pod, resolved.gpus_per_node),
        priority_class=extra.priority_class_name,
        runtime_class=profile.pod.runtime_class_name if resolved.gpus_per_node else None,
        scheduler=extra.scheduler_name,
        image_pull_secrets=[{"name": name} for name in dict.fromkeys([*own_logins, *profile.pod.image_pull_secrets])],
        agent={
            "image": agent_image,
            "env": profile_variables(profile),
            "resources": AGENT_RESOURCES,
            "security": agent_context(profile, resolved.transport),
            "mounts": cluster_mounts(resolved),
        },
        trainer={
            "image": resolved.image,
            "env": pod_variables(resolved),
            "env_from": [variables.to_dict() for variables in spec.env_from],
            "resources": _resources(resolved),
            "security": trainer_context(profile, resolved.transport),
            "mounts": mounts(resolved, reports=reports),
        },
        key_secret=key_secret,
        shm_size=profile.shm_size,
        report_audiences=[names.REPORT_AUDIENCE] if reports else [],
        volumes=[*claim_volumes(resolved), *extra_volumes(resolved)],
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


def _resources(resolved: Resolved) -> dict[str, dict[str, str]]:
    """CPU and memory, and devices as requests and limits alike, as Kubernetes wants extended resources."""
    devices = {GPU_RESOURCE: str(resolved.gpus_per_node)} if resolved.gpus_per_node else {}
    if resolved.transport is Transport.RDMA:
        devices |= rail_resources(resolved.profile.spec.network.rdma)
    return {"requests": resolved.amounts("requests") | devices, "limits": resolved.amounts("limits") | devices}


def variable_warnings(job: TrainingJob, profile: TrainingCluster) -> list[Notice]:
    """Variables that are written down and have no effect."""
    stated = [("the job's env", variable.name) for variable in job.spec.env]
    stated += [("the cluster's pod.env", variable.name) for variable in profile.spec.pod.env]
    token = job.spec.training is not None and job.spec.training.model.token_secret is not None
    twice = [where for where, name in stated if name == HUB_TOKEN and token]
    return [
        *[
            Notice("VariableIgnored", f"{HUB_TOKEN} in {where} has no effect: training.model.tokenSecret is used, remove one of them")
            for where in twice
        ],
        *[
            Notice("VariableIgnored", f"{name} in {where} has no effect: Lockstep sets it itself, remove it")
            for where, name in stated
            if name in OWN_VARIABLES or name.startswith(("LOCKSTEP_", "TORCHELASTIC_"))
        ],
    ]


def pod_variables(resolved: Resolved) -> list[dict[str, Any]]:
    """Variables of the container by name, once each: Lockstep's own win over the ranks', those over the cluster's.

    Without what the dynamic loader reads: that would reach the agent, too, and a library that can't be loaded there would end it.
    """
    spec, profile = resolved.job.spec, resolved.profile.spec
    variables = _home(resolved)
    variables |= {variable["name"]: {"value": variable["value"]} for variable in profile_variables(profile)}
    for name, value in rank_variables(resolved).items():
        variables[name] = {"value": literal(value)} if isinstance(value, str) else {"valueFrom": value.to_dict()}
    variables |= _token(spec.training)
    variables |= _own(resolved)
    return [{"name": name, **source} for name, source in variables.items() if not is_loaders(name)]


def _token(training: Training | None) -> dict[str, dict[str, Any]]:
    """The hub's token, which the kubelet reads from its Secret."""
    secret = None if training is None else training.model.token_secret
    return {} if secret is None else {HUB_TOKEN: {"valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}}


def loader_variables(resolved: Resolved) -> dict[str, str]:
    """Variables that the dynamic loader reads, which only ranks get. The job's win over the cluster's."""
    profiles = {variable.name: variable.value for variable in resolved.profile.spec.pod.env}
    stated = profiles | {variable.name: variable.value or "" for variable in resolved.job.spec.env}
    return {name: value for name, value in stated.items() if is_loaders(name)}


def profile_variables(profile: TrainingClusterSpec) -> list[dict[str, Any]]:
    """Variables that the cluster gives to every container of every pod, without what the dynamic loader reads: only ranks get that."""
    return [{"name": variable.name, "value": literal(variable.value)} for variable in profile.pod.env if not is_loaders(variable.name)]


def _home(resolved: Resolved) -> dict[str, dict[str, Any]]:
    """A UID without a line in /etc/passwd has no home and no name, and torch's and transformers' caches ask for both."""
    if locks_memory_as_root(resolved.profile.spec, resolved.transport):
        return {}
    return {"HOME": {"value": "/tmp"}, "USER": {"value": names.APP}}  # noqa: S108 (the pod's own emptyDir)


def _own(resolved: Resolved) -> dict[str, dict[str, Any]]:
    network = resolved.profile.spec.network
    own: dict[str, dict[str, Any]] = {
        "LOCKSTEP_NODE": {"valueFrom": _INDEX},
        POD_IPS: {"valueFrom": {"fieldRef": {"fieldPath": "status.podIPs"}}},
        "NODE_RANK": {"valueFrom": _INDEX},
        "NNODES": {"value": str(resolved.nodes)},
        "GPUS_PER_NODE": {"value": str(resolved.gpus_per_node)},
        "MASTER_ADDR": {"value": names.node_address(resolved.name, 0)},
        "MASTER_PORT": {"value": str(names.MASTER_PORT)},
    }
    if resolved.job.spec.type is JobType.INTERACTIVE:
        own["WORLD_SIZE"] = {"value": str(resolved.world_size)}
        own["LOCKSTEP_SOCKET"] = {"value": names.AGENT_SOCKET}
    if resolved.transport is Transport.RDMA and network.mtu is not None:
        own["LOCKSTEP_RAIL_MTU"] = {"value": str(network.mtu)}
    return own


def literal(value: str) -> str:
    """`value` so that the pod sees it unchanged.

    The kubelet expands $(NAME) in values and turns every $$ into $, so each $ is doubled, not only those before a bracket.
    """
    return value.replace("$", "$$")
