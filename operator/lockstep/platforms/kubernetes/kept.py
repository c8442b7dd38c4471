"""An object as the inventory keeps it. A thousand jobs have eight thousand objects, and dicts take ten times what their text takes.

What belongs to one job is looked at only when that job is: it is kept as compressed text. What every job's reconcile looks through
(Nodes, profiles, claims, pods) stays as it is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.api.names import LABEL_JOB
from lockstep.plan.observed import Object

PACKED = frozenset({"TrainingJob", "StatefulSet", "Service", "NetworkPolicy", "ConfigMap", "Secret"})
_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "generation", "labels", "annotations", "ownerReferences", "deletionTimestamp",
    "creationTimestamp",
)  # fmt: skip


class Kept:
    """One object: its version, uid and job, and the part of it that decisions are made from."""

    __slots__ = ("_content", "job", "uid", "version")

    def __init__(self, kind: str, item: Mapping[str, Any]) -> None:
        metadata = item["metadata"]
        self.version = version_of(item)
        self.uid = str(metadata["uid"])
        self.job = job_of(item)
        projected = {**_KEPT.get(kind, _whole)(item), "kind": kind, "metadata": {k: metadata[k] for k in _METADATA if k in metadata}}
        projected["metadata"].pop("resourceVersion", None)
        self._content = _pack(projected) if kind in PACKED else projected

    @property
    def item(self) -> Object:
        """As decisions see it."""
        content: Object = json.loads(zlib.decompress(self._content)) if isinstance(self._content, bytes) else self._content
        return {**content, "metadata": {**content["metadata"], "resourceVersion": str(self.version)}}

    def says_the_same(self, other: Kept) -> bool:
        """But for the version: a heartbeat of a Node, say."""
        return self._content == other._content


def _pack(item: Object) -> bytes:
    return zlib.compress(json.dumps(item, separators=(",", ":")).encode(), 1)


def job_of(item: Mapping[str, Any]) -> str:
    """The name of the job that the object belongs to; '' for none."""
    return str((item["metadata"].get("labels") or {}).get(LABEL_JOB, ""))


def version_of(item: Mapping[str, Any]) -> int:
    version = item["metadata"].get("resourceVersion", "0")
    return int(version) if str(version).isdigit() else 0


def _node(item: Mapping[str, Any]) -> Object:
    spec = {key: item["spec"][key] for key in ("taints", "unschedulable") if item.get("spec", {}).get(key)}
    status = item.get("status", {})
    kept = ("type", "status", "lastTransitionTime")  # not the heartbeat, which changes all the time
    ready = [{key: c[key] for key in kept if key in c} for c in status.get("conditions") or [] if c["type"] == "Ready"]
    return {"spec": spec, "status": {"allocatable": status.get("allocatable", {}), "conditions": ready}}


def _event(item: Mapping[str, Any]) -> Object:
    kept = ("involvedObject", "reason", "message", "lastTimestamp", "eventTime", "series", "type")
    return {key: item[key] for key in kept if item.get(key) is not None}


def _pod(item: Mapping[str, Any]) -> Object:
    spec, status = item.get("spec", {}), item.get("status", {})
    decides = ("nodeName", "nodeSelector", "affinity", "tolerations", "schedulerName", "schedulingGates")
    kept = {key: spec[key] for key in decides if spec.get(key)}
    kept["containers"] = [
        {"name": c["name"], "resources": {"requests": c.get("resources", {}).get("requests") or {}}} for c in spec.get("containers", [])
    ]
    kept["volumes"] = [v for v in spec.get("volumes") or [] if "persistentVolumeClaim" in v]
    dropped = ("qosClass", "hostIP", "hostIPs", "podIP", "podIPs")
    return {"spec": kept, "status": {key: value for key, value in status.items() if key not in dropped}}


def _claim(item: Mapping[str, Any]) -> Object:
    kept = ("accessModes", "storageClassName", "volumeName")
    spec = {key: item["spec"][key] for key in kept if item.get("spec", {}).get(key)}
    return {"spec": spec, "status": {"phase": item.get("status", {}).get("phase", "Pending")}}


def _whole(item: Mapping[str, Any]) -> Object:
    return {key: value for key, value in item.items() if key != "metadata"}


_KEPT: dict[str, Callable[[Mapping[str, Any]], Object]] = {
    "Node": _node, "Event": _event, "Pod": _pod, "PersistentVolumeClaim": _claim, "ServiceAccount": lambda item: {},
}  # fmt: skip
