"""Short-lived pods that look at nodes from inside: what they are, and what their logs say (pure)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lockstep.api import names
from lockstep.api.cluster import Platform, TrainingClusterSpec
from lockstep.api.objects import Object
from lockstep.plan.cluster.facts import ClusterFacts, ProbeFacts
from lockstep.plan.discovery.nodes import common_tolerations, gpu_groups
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep.plan.render.security import agent_context
from lockstep.plan.waiting.containers import start_phase
from lockstep_gang.contract.preflight import PROBE, PROBED
from lockstep_spec.codec import from_json

PROBE_LABEL = f"{names.GROUP}/probe"
WAIT_SECONDS = 120.0
"""Seconds for all pods together, the pull of the image included. A pod that has not ended by then is reported as it is."""
SECONDS = 180
"""After which a pod is ended by its kubelet, whoever made it."""
UNKNOWN_NODES = 2
"""Pods where nodes may not be listed: each on a node of its own."""
NODES_MAX = 64
RESOURCES: Object = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


def probed_nodes(facts: ClusterFacts) -> list[str | None]:
    """Names of the nodes to look at: those with GPUs, else all. None: wherever the scheduler finds room."""
    groups = gpu_groups(facts)
    nodes = groups[0].nodes if groups else facts.list("Node").items
    named: list[str | None] = [str(node["metadata"]["name"]) for node in nodes if not node.get("spec", {}).get("unschedulable")]
    return named[:NODES_MAX] or [None] * UNKNOWN_NODES


def probe_pods(facts: ClusterFacts, token: str, image: str) -> Iterator[Object]:
    """A pod a node, under Pod Security `restricted`, without GPU: it never waits for one."""
    platform = Platform.OPENSHIFT if facts.is_openshift else Platform.KUBERNETES
    security = agent_context(TrainingClusterSpec(platform=platform))
    container = {
        "name": "probe",
        "image": image,
        "command": ["python3", "-I", names.AGENT_PATH, PROBE],
        "securityContext": security,
        "resources": RESOURCES,
        "volumeMounts": [{"name": "agent", "mountPath": names.AGENT_FOLDER}],
    }
    groups = gpu_groups(facts)
    tolerated = common_tolerations(groups[0].nodes) if groups else []  # as the file will say it
    for number, node in enumerate(probed_nodes(facts)):
        spec: Object = {
            "containers": [container],
            "volumes": [{"name": "agent", "configMap": {"name": probe_name(token)}}],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": SECONDS,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}, *tolerated],
            "affinity": _on(node) if node is not None else _apart(token),
        }
        metadata = {"name": f"{probe_name(token)}-{number}", "namespace": facts.namespace, "labels": {PROBE_LABEL: token}}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def probe_name(token: str) -> str:
    return f"lockstep-probe-{token}"


def _on(node: str) -> Object:
    rule = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [rule]}]}}}


def _apart(token: str) -> Object:
    rule = {"labelSelector": {"matchLabels": {PROBE_LABEL: token}}, "topologyKey": names.LABEL_HOSTNAME}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}}


def read_probe(pod: Object, lines: Sequence[str], why: str = "") -> ProbeFacts:
    """Read what one pod saw, or why it saw nothing; `why`: what keeps it from running."""
    node = str(pod["spec"].get("nodeName") or _wanted(pod) or "a node that no pod reached")
    text = next((line.partition(PROBED)[2] for line in lines if PROBED in line), None)
    if text is None:
        status = pod.get("status") or {}
        is_pending = status.get("phase", "Pending") == "Pending"
        silence = f"has not started after {WAIT_SECONDS:.0f} s: {start_phase(pod)}" if is_pending else "it printed nothing"
        return ProbeFacts(node, error=why or str(status.get("message", "")) or (lines[-1] if lines else silence))
    try:
        return replace(from_json(ProbeFacts, json.loads(text), "it"), node=node)
    except (ValueError, RecursionError):
        return ProbeFacts(node, error=f"the probe's image says {text[:100]!r}, which is no probe's answer")


def _wanted(pod: Object) -> str | None:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
    return terms[0]["matchFields"][0]["values"][0] if terms else None
