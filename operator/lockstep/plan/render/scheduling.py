"""Nodes that a job's pods may run on: the cluster's, without those that preflight found bad, and with taints that are tolerated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.api.cluster import ClusterPod, Nodes, TrainingClusterSpec
from lockstep.api.names import LABEL_HOSTNAME
from lockstep.api.podtemplate import PodTemplate
from lockstep.plan.layers import Notice
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep_spec.words import listed

GPU_TOLERATION = {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}


def scheduling_refusals(template: PodTemplate, allowed: Nodes, profile_name: str, nodes: int) -> list[Notice]:
    """Refusals of what no node could ever satisfy."""
    refusals = [
        Notice(
            "NodeSelectorConflict",
            f"podTemplate.nodeSelector[{key}] is {value!r}, but the cluster {profile_name} asks for"
            f" {allowed.selector[key]!r} (nodes.selector), so no node fits: remove it from the job",
        )
        for key, value in template.node_selector.items()
        if allowed.selector.get(key, value) != value
    ]
    if allowed.gpu_nodes and nodes > len(allowed.gpu_nodes):
        message = (
            f"nodes is {nodes}, but the cluster {profile_name} allows {len(allowed.gpu_nodes)} (nodes.gpuNodes:"
            f" {listed(allowed.gpu_nodes)}), one pod each: ask for fewer or add nodes there"
        )
        refusals.insert(0, Notice("NotEnoughNodes", message))
    return refusals


def tolerations(template: PodTemplate, cluster: ClusterPod, gpus_per_node: int) -> list[dict[str, Any]]:
    """The job's, the cluster's, and the taint that GPU nodes usually have when GPUs are asked; each once."""
    stated = [toleration.to_dict() for toleration in (*template.tolerations, *cluster.tolerations)]
    stated += [GPU_TOLERATION] if gpus_per_node else []
    return [toleration for number, toleration in enumerate(stated) if toleration not in stated[:number]]


def usual_tolerations(profile: TrainingClusterSpec) -> list[dict[str, Any]]:
    """Tolerations of a job that states none of its own."""
    return tolerations(PodTemplate(), profile.pod, profile.gpus.per_node)


def node_terms(nodes: Nodes, excluded: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return what a node must match: the cluster's host names, when it lists them, and none that preflight found bad for this job. At most
    one term.
    """
    term: dict[str, Any] = {}
    if nodes.gpu_nodes:
        term["matchExpressions"] = [{"key": LABEL_HOSTNAME, "operator": "In", "values": nodes.gpu_nodes}]
    if excluded:  # by the Node's name, which a label need not repeat; a field takes one value at a time
        term["matchFields"] = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(excluded)]
    return [term] if term else []
