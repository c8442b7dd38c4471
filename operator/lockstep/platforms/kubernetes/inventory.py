"""What the operator has seen of the cluster, by watch and by list, kept as small as what is asked of it.

Losing an event costs time only: a slow resync replaces everything with what a list says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.api.names import APP, LABEL_JOB, LABEL_MANAGED_BY, key_secret_name
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Object, Observed
from lockstep.plan.pods import is_scheduled, scheduler_message
from lockstep.platforms.kubernetes.queue import Key

OF_JOBS = f"{LABEL_JOB},{LABEL_MANAGED_BY}={APP}"


@dataclass(frozen=True)
class Watched:
    """A kind to watch, and which of its objects (selectors of the API server)."""

    kind: str
    label_selector: str = ""
    field_selector: str = ""

    @property
    def query(self) -> dict[str, str]:
        given = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {key: value for key, value in given.items() if value}


WATCHED = (
    Watched("TrainingJob"),
    Watched("ClusterProfile"),
    Watched("Pod", OF_JOBS),
    Watched("StatefulSet", OF_JOBS),
    Watched("Service", OF_JOBS),
    Watched("NetworkPolicy", OF_JOBS),
    Watched("ConfigMap", OF_JOBS),
    Watched("PersistentVolumeClaim"),  # jobs mount claims that anybody made
    Watched("ServiceAccount"),
    Watched("Node"),
    Watched("Event", field_selector="type=Warning,involvedObject.kind!=Node"),
)
EVENT_REASONS = frozenset(
    {
        "FailedCreate", "FailedMount", "FailedAttachVolume", "FailedMapVolume", "ProvisioningFailed", "FailedBinding", "FailedCreatePodSandBox",
    }
)  # fmt: skip
_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "generation", "labels", "annotations", "ownerReferences", "deletionTimestamp",
    "creationTimestamp",
)  # fmt: skip


def _node(item: Object) -> Object:
    spec = {key: item["spec"][key] for key in ("taints", "unschedulable") if item.get("spec", {}).get(key)}
    status = item.get("status", {})
    kept = ("type", "status", "lastTransitionTime")  # not the heartbeat, which changes all the time
    ready = [{key: c[key] for key in kept if key in c} for c in status.get("conditions") or [] if c["type"] == "Ready"]
    return {"spec": spec, "status": {"allocatable": status.get("allocatable", {}), "conditions": ready}}


def _event(item: Object) -> Object:
    kept = ("involvedObject", "reason", "message", "lastTimestamp", "eventTime", "series", "type")
    return {key: item[key] for key in kept if item.get(key) is not None}


def _whole(item: Object) -> Object:
    return {key: value for key, value in item.items() if key != "metadata"}


_KEPT: dict[str, Callable[[Object], Object]] = {"Node": _node, "Event": _event, "ServiceAccount": lambda item: {}}


def project(kind: str, item: Mapping[str, Any]) -> Object:
    """The part of an object that decisions are made from."""
    metadata = {key: item["metadata"][key] for key in _METADATA if key in item["metadata"]}
    return {**_KEPT.get(kind, _whole)(dict(item)), "kind": kind, "metadata": metadata}


class Inventory:
    """All watched objects; `observe` says whose jobs an event concerns."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[Key, Object]] = defaultdict(dict)
        self._by_job: dict[Key, dict[tuple[str, str], Object]] = defaultdict(dict)
        self._obstacles: dict[Key, Notice] = {}
        self._last_deletion: dict[str, int] = defaultdict(int)

    def observe_write(self, kind: str, item: Mapping[str, Any]) -> set[Key]:
        """Take in the reply to a write, ahead of the watch; one of an object that was deleted meanwhile changes nothing."""
        known = self._objects[kind].get((item["metadata"].get("namespace", ""), item["metadata"]["name"]))
        is_known = known is not None and known["metadata"]["uid"] == item["metadata"]["uid"]
        if not is_known and _version(item) <= self._last_deletion[kind]:
            return set()
        return self.observe(kind, item, deleted=False)

    def observe(self, kind: str, item: Mapping[str, Any], *, deleted: bool) -> set[Key]:
        """Take in one event; the keys of jobs that it may change. An event older than what is known changes nothing."""
        if kind == "Event" and item.get("reason") not in EVENT_REASONS:
            return set()
        if deleted:
            self._last_deletion[kind] = max(self._last_deletion[kind], _version(item))
        key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
        known = self._objects[kind].get(key)
        if known is not None and _version(known) > _version(item):
            return set()
        if deleted and known is not None and known["metadata"]["uid"] != item["metadata"]["uid"]:
            return set()
        now = None if deleted else project(kind, item)
        self._put(kind, key, now)
        if now is not None and known is not None and _unversioned(now) == _unversioned(known):
            return set()  # a heartbeat of a node, say
        if kind == "TrainingJob" and deleted:
            self.forget_secret(key)
        return self._concerned(kind, key, item)

    def replace(self, kind: str, items: Iterable[Object], version: int) -> None:
        """Take in a list: what it doesn't have is gone, unless it is newer than the list."""
        self._last_deletion[kind] = max(self._last_deletion[kind], version)
        listed = {(item["metadata"].get("namespace", ""), item["metadata"]["name"]): item for item in items}
        for key in [key for key, item in self._objects[kind].items() if key not in listed and _version(item) <= version]:
            self._put(kind, key, None)
        for item in listed.values():
            self.observe(kind, item, deleted=False)

    def forget_secret(self, job: Key) -> None:
        """Secrets aren't watched: what is known of them is what was written."""
        self._put("Secret", (job[0], key_secret_name(job[1])), None)

    def _put(self, kind: str, key: Key, item: Object | None) -> None:
        old = self._objects[kind].pop(key, None)
        if old is not None and (job := job_of(old)):
            self._by_job[key[0], job].pop((kind, key[1]), None)
        if item is not None:
            self._objects[kind][key] = item
            if job := job_of(item):
                self._by_job[key[0], job][kind, key[1]] = item

    def _concerned(self, kind: str, key: Key, item: Mapping[str, Any]) -> set[Key]:
        if kind == "TrainingJob":
            return {key}
        if kind in ("ClusterProfile", "Node"):
            return set(self.jobs())
        job = job_of(item)
        if job:
            return {(key[0], job)}
        return {found for found in self.jobs() if found[0] == key[0]}

    def jobs(self) -> list[Key]:
        return list(self._objects["TrainingJob"])

    def job_objects(self) -> list[Object]:
        """The TrainingJobs themselves, as they are stored."""
        return list(self._objects["TrainingJob"].values())

    def observed(self, key: Key) -> Observed | None:
        """All that is known about one job; None when there is no such job."""
        job = self._objects["TrainingJob"].get(key)
        if job is None:
            self._obstacles.pop(key, None)
            return None
        namespace = key[0]
        children = self._by_job.get(key, {})
        pods = tuple(sorted((i for c, i in children.items() if c[0] == "Pod"), key=lambda pod: str(pod["metadata"]["name"])))
        return Observed(
            job=job,
            profiles=tuple(self._objects["ClusterProfile"].values()),
            objects={child: item for child, item in children.items() if child[0] != "Pod"},
            pods=pods,
            nodes=tuple(self._objects["Node"].values()),
            claims={name: item for (place, name), item in self._objects["PersistentVolumeClaim"].items() if place == namespace},
            service_accounts=frozenset(name for place, name in self._objects["ServiceAccount"] if place == namespace),
            warnings=tuple(item for (place, _), item in self._objects["Event"].items() if place == namespace),
            others=self._pods_of_others(key) if any(map(scheduler_message, pods)) else (),
            obstacle=self._obstacles.get(key),
        )

    def _pods_of_others(self, job: Key) -> tuple[Object, ...]:
        found = self._objects["Pod"].values()
        return tuple(pod for pod in found if is_scheduled(pod) and (pod["metadata"].get("namespace", ""), job_of(pod)) != job)

    def pod(self, namespace: str, name: str) -> Object | None:
        return self._objects["Pod"].get((namespace, name))

    def set_obstacle(self, key: Key, obstacle: Notice | None) -> None:
        """Why the last write for this job failed."""
        if obstacle is None:
            self._obstacles.pop(key, None)
        else:
            self._obstacles[key] = obstacle


def job_of(item: Mapping[str, Any]) -> str:
    """The name of the job that the object belongs to; '' for none."""
    return str((item["metadata"].get("labels") or {}).get(LABEL_JOB, ""))


def _unversioned(item: Object) -> Object:
    return {**item, "metadata": {key: value for key, value in item["metadata"].items() if key != "resourceVersion"}}


def _version(item: Mapping[str, Any]) -> int:
    version = item["metadata"].get("resourceVersion", "0")
    return int(version) if str(version).isdigit() else 0
