"""An object as the inventory keeps it. A thousand jobs have eight thousand objects, and dicts take ten times what their text takes.

What belongs to one job is looked at only when that job is: it is kept as compressed text. What every job's reconcile looks through
(Nodes, clusters, claims, pods) stays as it is.

How much is kept of one object is limited, whatever somebody wrote into it: of what is larger, or too deep, only the small fields are kept,
and `observed.UNREADABLE` says why. Of a job's children the rest is read by name when that job is looked at (`StoredObject.is_cut`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.api.names import APP, GROUP, LABEL_JOB
from lockstep.api.objects import DEPTH_MAX, Object
from lockstep.kube.reading import cut_depths
from lockstep.plan.observed import REPLICAS_BY, UNREADABLE
from lockstep.plan.reconcile.status import fitted, readable

CHILDREN = frozenset({"StatefulSet", "Service", "NetworkPolicy", "ConfigMap"})
"""Kinds of a job's children that are not pods: what is kept of a large one is read again by its name when it is needed."""
PACKED = CHILDREN | {"TrainingJob", "Secret"}
FREE_FORM = frozenset({"TrainingJob", "TrainingCluster"})
"""Kinds whose objects may be of any depth."""
BYTES_MAX = {"TrainingJob": 384 << 10, "TrainingCluster": 1 << 20, "ConfigMap": 2 << 20, "StatefulSet": 2 << 20}
"""Bytes of an object's JSON without its metadata, a job's without its status, too; other kinds have OTHER_BYTES_MAX. Only administrators
write TrainingClusters.
"""
OTHER_BYTES_MAX = 64 << 10
PACKED_BYTES_MAX = 32 << 10
"""Bytes of a child of a job, compressed."""
SMALL_CHARACTERS = 2048
"""A field that is kept of an object that is too large."""
MESSAGE_CHARACTERS = 4096
LABELS_MAX, OWNERS_MAX, FINALIZERS_MAX = 64, 8, 4
_METADATA = ("name", "namespace", "uid", "generation", "deletionTimestamp", "deletionGracePeriodSeconds", "creationTimestamp")
_OWN_PREFIXES = (f"{GROUP}/", "app.kubernetes.io/", "kueue.x-k8s.io/", "apps.kubernetes.io/", "kubernetes.io/")


class StoredObject:
    """One object: its version, uid and job, and the part of it that decisions are made from."""

    __slots__ = ("_content", "is_cut", "job", "uid", "version")

    def __init__(self, kind: str, item: Mapping[str, Any]) -> None:
        metadata = item["metadata"]
        self.version = version_of(item)
        self.uid = str(metadata["uid"])
        self.job = job_of(item)
        content, self.is_cut = _bounded(kind, _REDUCED.get(kind, _whole)(item))
        projected = {**content, "kind": kind, "metadata": _metadata(metadata)}
        self._content = _pack(projected) if kind in PACKED else projected
        if kind in CHILDREN and isinstance(self._content, bytes) and len(self._content) > PACKED_BYTES_MAX:
            self.is_cut, self._content = True, _pack({**_small(kind, content), "kind": kind, "metadata": projected["metadata"]})

    @property
    def item(self) -> Object:
        """The object as decisions see it."""
        content: Object = json.loads(zlib.decompress(self._content)) if isinstance(self._content, bytes) else self._content
        return {**content, "metadata": {**content["metadata"], "resourceVersion": str(self.version)}}

    def says_the_same(self, other: StoredObject) -> bool:
        """But for the version: a heartbeat of a Node, say."""
        return self._content == other._content


def _metadata(metadata: Mapping[str, Any]) -> Object:
    """Return metadata without what nobody decides by, which may be large: managedFields, annotations of others, and finalizers of what
    nobody deletes.
    """
    reduced: Object = {key: metadata[key] for key in _METADATA if key in metadata}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if labels:
        few = len(labels) <= LABELS_MAX
        reduced["labels"] = {key: value for key, value in labels.items() if few or key.startswith(_OWN_PREFIXES) or key == APP}
    own = {key: value for key, value in annotations.items() if key.startswith(f"{GROUP}/") and len(value) <= SMALL_CHARACTERS}
    if own:
        reduced["annotations"] = own
    if metadata.get("deletionTimestamp") and metadata.get("finalizers"):
        reduced["finalizers"] = metadata["finalizers"][:FINALIZERS_MAX]
    if metadata.get("ownerReferences"):
        reduced["ownerReferences"] = sorted(metadata["ownerReferences"], key=lambda owner: not owner.get("controller"))[:OWNERS_MAX]
    return reduced


def _bounded(kind: str, content: Object) -> tuple[Object, bool]:
    """Return what is kept of an object beside its metadata, and whether more of it is to be read when it is needed."""
    if kind == "ConfigMap" and not content.keys() & {"data", "binaryData"}:
        return content, True  # lists and watches of ConfigMaps bring metadata only
    if kind in FREE_FORM and cut_depths(content, DEPTH_MAX):
        return {
            **content,
            UNREADABLE: f"it has a field that is nested deeper than {DEPTH_MAX} levels, which nothing can read: make it flatter",
        }, False
    if _size(content) <= BYTES_MAX.get(kind, OTHER_BYTES_MAX):
        return content, False
    return _bounded_job(content) if kind == "TrainingJob" else _bounded_other(kind, content)


def _bounded_job(content: Object) -> tuple[Object, bool]:
    """Return what is kept of a job. Its spec is too large or not by itself. Its status stays whatever the spec has: that the job ended, for
    one.
    """
    status = {"status": fitted(content["status"])} if isinstance(content.get("status"), dict) else {}
    stated = {key: value for key, value in content.items() if key != "status"}
    if _size(stated) <= BYTES_MAX["TrainingJob"]:
        return {**stated, **status}, False
    return {**_bounded_other("TrainingJob", stated)[0], **status}, False


def _bounded_other(kind: str, content: Object) -> tuple[Object, bool]:
    size, most = _size(content), BYTES_MAX.get(kind, OTHER_BYTES_MAX)
    return {**_small(kind, content), UNREADABLE: f"it has {size} bytes, at most {most} can be read: make it smaller"}, kind in CHILDREN


def _size(content: Object) -> int:
    return len(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode(errors="replace"))


def _small(kind: str, content: Object) -> Object:
    """The small ones of its fields, and those without which nothing can be told of an object of that kind."""
    parts = {part: _small_fields(content[part]) for part in ("spec", "status") if isinstance(content.get(part), dict)}
    needed = _NEEDED.get(kind, {})
    texts = {key: value for key, value in content.items() if isinstance(value, str) and len(value) <= SMALL_CHARACTERS}
    return texts | {part: {**needed.get(part, {}), **parts.get(part, {})} for part in {**needed, **parts}}


def _small_fields(values: Object) -> Object:
    return {key: value for key, value in values.items() if len(json.dumps(value)) <= SMALL_CHARACTERS}


_NEEDED: Mapping[str, Mapping[str, Object]] = {
    "TrainingJob": {"spec": {}},
    "TrainingCluster": {"spec": {}},
    "Pod": {"spec": {"containers": [], "volumes": []}, "status": {}},
    "Node": {"spec": {}, "status": {"allocatable": {}, "conditions": []}},
    "StatefulSet": {"spec": {}},
    "PersistentVolumeClaim": {"spec": {}, "status": {"phase": "Pending"}},
}


def _pack(item: Object) -> bytes:
    return zlib.compress(json.dumps(item, separators=(",", ":")).encode(), 1)


def job_of(item: Mapping[str, Any]) -> str:
    """The name of the job that the object belongs to; '' for none."""
    return str((item["metadata"].get("labels") or {}).get(LABEL_JOB, ""))


def version_of(item: Mapping[str, Any]) -> int:
    version = item["metadata"].get("resourceVersion", "0")
    return int(version) if str(version).isdigit() else 0


def _training_job(item: Mapping[str, Any]) -> Object:
    whole = _whole(item)
    return {**whole, "status": readable(whole["status"])} if isinstance(whole.get("status"), dict) else whole


def _node(item: Mapping[str, Any]) -> Object:
    spec = {key: item["spec"][key] for key in ("taints", "unschedulable") if item.get("spec", {}).get(key)}
    status = item.get("status", {})
    fields = ("type", "status", "lastTransitionTime")  # not the heartbeat, which changes all the time
    ready = [{key: c[key] for key in fields if key in c} for c in status.get("conditions") or [] if c["type"] == "Ready"]
    return {"spec": spec, "status": {"allocatable": status.get("allocatable", {}), "conditions": ready}}


def _stateful_set(item: Mapping[str, Any]) -> Object:
    by = _replicas_by(item["metadata"].get("managedFields") or [])
    return {**_whole(item), REPLICAS_BY: by} if by else _whole(item)


def _replicas_by(entries: list[Object]) -> Object:
    """Return who wrote spec.replicas last. Two that own it have written the same."""
    owners = [entry for entry in entries if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})]
    newest = max(owners, key=lambda entry: str(entry.get("time", "")), default=None)
    return {} if newest is None else {key: str(newest[key])[:SMALL_CHARACTERS] for key in ("manager", "time") if key in newest}


def _event(item: Mapping[str, Any]) -> Object:
    fields = ("reason", "lastTimestamp", "eventTime", "series", "type")
    about = {
        key: str(item["involvedObject"][key])[:SMALL_CHARACTERS]
        for key in ("kind", "name", "uid", "fieldPath")
        if key in item["involvedObject"]
    }
    message = str(item.get("message") or "")[:MESSAGE_CHARACTERS]
    return {key: item[key] for key in fields if item.get(key) is not None} | {"involvedObject": about, "message": message}


def _pod(item: Mapping[str, Any]) -> Object:
    spec, status = item.get("spec", {}), item.get("status", {})
    decides = ("nodeName", "nodeSelector", "affinity", "tolerations", "schedulerName", "schedulingGates", "overhead", "priority")
    reduced = {key: spec[key] for key in decides if spec.get(key)}
    reduced["containers"] = [_container(c) for c in spec.get("containers", [])]
    preparing = [
        _container(c) | ({"restartPolicy": c["restartPolicy"]} if "restartPolicy" in c else {}) for c in spec.get("initContainers") or []
    ]
    if any(c["resources"]["requests"] for c in preparing):
        reduced["initContainers"] = preparing
    reduced["volumes"] = [v for v in spec.get("volumes") or [] if "persistentVolumeClaim" in v]
    dropped = ("qosClass", "hostIP", "hostIPs", "podIP", "podIPs")
    return {"spec": reduced, "status": {key: value for key, value in status.items() if key not in dropped}}


def _container(container: Object) -> Object:
    return {"name": container["name"], "resources": {"requests": container.get("resources", {}).get("requests") or {}}}


def _claim(item: Mapping[str, Any]) -> Object:
    fields = ("accessModes", "storageClassName", "volumeName")
    spec = {key: item["spec"][key] for key in fields if item.get("spec", {}).get(key)}
    return {"spec": spec, "status": {"phase": item.get("status", {}).get("phase", "Pending")}}


def _whole(item: Mapping[str, Any]) -> Object:
    return {key: value for key, value in item.items() if key != "metadata"}


_REDUCED: dict[str, Callable[[Mapping[str, Any]], Object]] = {
    "TrainingJob": _training_job, "Node": _node, "Event": _event, "Pod": _pod, "PersistentVolumeClaim": _claim,
    "StatefulSet": _stateful_set, "ServiceAccount": lambda item: {},
    "ConfigMap": lambda item: {key: item[key] for key in ("data", "binaryData", "immutable") if key in item},
}  # fmt: skip
