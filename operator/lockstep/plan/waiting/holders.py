"""Holders of what a job waits for, and the command that frees it (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from lockstep.api.names import LABEL_JOB
from lockstep.api.objects import Object
from lockstep.plan.waiting.requests import request
from lockstep_spec.words import listed

NAMED_HOLDERS = 3
JOB_KIND = "TrainingJob"
UNUSED = ", a dev environment in which nothing runs,"
_OVER = ("Succeeded", "Failed")
_HASH_LABEL = "pod-template-hash"
LEAST_SHARE = Decimal("0.1")
"""Least share of the request that a holder has to have. Whoever holds less (a DaemonSet's 100 m of CPU, say) isn't in the way."""


@dataclass(frozen=True)
class Holder:
    """Somebody's pods on the nodes that a job could use."""

    kind: str
    namespace: str
    name: str
    held: Decimal
    command: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}{self.note} holds {self.held.normalize():f}" + (
            f" ({self.command})" if self.command else ""
        )


def holders(
    pods: Iterable[Object], nodes: frozenset[str], resource: str, asked: Decimal, unused: frozenset[tuple[str, str]] = frozenset()
) -> list[Holder]:
    """Holders of `resource` on these nodes: dev environments that nobody uses (`unused`: namespace and name), then the largest."""
    held: dict[tuple[str, str, str, str], Decimal] = defaultdict(Decimal)
    for pod in pods:
        there = pod["spec"].get("nodeName") in nodes and pod.get("status", {}).get("phase") not in _OVER
        if there and (has := request(pod, resource)):
            held[_owner(pod)] += has
    found = [
        Holder(kind, namespace, name, has, command, UNUSED if kind == JOB_KIND and (namespace, name) in unused else "")
        for (kind, namespace, name, command), has in held.items()
    ]
    return sorted((h for h in found if h.held >= asked * LEAST_SHARE), key=lambda h: (not h.note, -h.held, h.namespace, h.name))


def who_holds(
    pods: Iterable[Object], nodes: frozenset[str], resource: str, asked: Decimal, unused: frozenset[tuple[str, str]] = frozenset()
) -> str:
    """The largest holders, each with the command that frees what it has; '' when nobody is seen."""
    found = holders(pods, nodes, resource, asked, unused)
    return listed(found, NAMED_HOLDERS, "; ")


def _owner(pod: Object) -> tuple[str, str, str, str]:
    """(kind, namespace, name, command) of whoever made the pod."""
    metadata = pod["metadata"]
    namespace, name, labels = str(metadata.get("namespace", "")), str(metadata["name"]), metadata.get("labels") or {}
    if LABEL_JOB in labels:
        return JOB_KIND, namespace, labels[LABEL_JOB], suspend_command(labels[LABEL_JOB], namespace)
    owner = next((o for o in metadata.get("ownerReferences", []) if o.get("controller")), None)
    if owner is None:
        return "Pod", namespace, name, f"kubectl delete pod {name} -n {namespace}"
    kind, name = str(owner["kind"]), str(owner["name"])
    if kind == "ReplicaSet" and name.endswith(f"-{labels.get(_HASH_LABEL)}"):
        kind, name = "Deployment", name.removesuffix(f"-{labels[_HASH_LABEL]}")
    if kind in ("StatefulSet", "Deployment", "ReplicaSet"):
        return kind, namespace, name, f"kubectl scale {kind.lower()} {name} -n {namespace} --replicas=0"
    if kind == "Job":
        return kind, namespace, name, f"""kubectl patch job {name} -n {namespace} --type merge -p '{{"spec":{{"suspend":true}}}}'"""
    return kind, namespace, name, ""


def suspend_command(job: str, namespace: str) -> str:
    return f"""kubectl patch tj {job} -n {namespace} --type merge -p '{{"spec":{{"suspend":true}}}}'"""
