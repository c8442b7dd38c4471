"""Inventory of the cluster as the operator has seen it, by watch and by list, kept as small as what is asked of it.

Losing an event costs time only: a slow resync replaces everything with what a list says.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.api.names import (
    ANNOTATION_RUN_HASH,
    APP,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    NODES_MAX,
    OPERATOR_NAME,
    log_name,
    run_name,
    service_name,
)
from lockstep.api.objects import Object
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, owner_uid
from lockstep.plan.reconcile.interactive import is_interactive, unused
from lockstep.plan.reconcile.placing import contender, is_unplaced
from lockstep.plan.waiting.containers import PULL_EVENT, is_scheduled, scheduler_message
from lockstep.plan.waiting.nodes import unnamed
from lockstep.platforms.operator.memory.objects import StoredObject, job_of, version_of
from lockstep.platforms.operator.memory.queue import Key

log = logging.getLogger("lockstep.operator")
OF_JOBS = f"{LABEL_JOB},{LABEL_MANAGED_BY}={APP}"


@dataclass(frozen=True)
class Watched:
    """A kind to watch, and which of its objects (selectors of the API server)."""

    kind: str
    label_selector: str = ""
    field_selector: str = ""
    metadata_only: bool = False
    """True if metadata is enough: of ServiceAccounts only names count, and ConfigMaps are read by name if needed: anybody may make large
    ones.
    """

    @property
    def query(self) -> dict[str, str]:
        selectors = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {key: value for key, value in selectors.items() if value}


WATCHED = (
    Watched("TrainingJob"),
    Watched("TrainingCluster"),
    Watched("Pod", OF_JOBS),
    Watched("StatefulSet", OF_JOBS),
    Watched("Service", OF_JOBS),
    Watched("NetworkPolicy", OF_JOBS),
    Watched("ConfigMap", OF_JOBS, metadata_only=True),
    Watched("PersistentVolumeClaim"),  # jobs mount claims that anybody made
    Watched("ServiceAccount", metadata_only=True),
    Watched("Node"),
    Watched("Event", field_selector="type=Warning,involvedObject.kind!=Node,involvedObject.kind!=TrainingJob"),
)
"""Kinds to watch. The operator's own Events are left out; they outlive their jobs by an hour."""
EVENT_REASONS = frozenset(
    {
        "FailedCreate", "FailedMount", "FailedAttachVolume", "FailedMapVolume", "ProvisioningFailed", "FailedBinding",
        "FailedCreatePodSandBox", "FailedToRetrieveImagePullSecret",
    }
)  # fmt: skip


EVENTS_MAX = 500
"""Events kept of a namespace: the newest. Anybody may write Events."""
CONTENTS_MAX = 4
"""Frozen runs that are read for one job: those that its pods name, then the newest."""


class Inventory:
    """All watched objects; `observe` says whose jobs an event concerns."""

    def __init__(self) -> None:
        self.sees_nodes = True
        """True if the operator may list them; otherwise it has none to tell of."""
        self.unsettled_seconds: Callable[[], float] = lambda: 0.0
        """See Observed."""
        self._objects: dict[str, dict[Key, StoredObject]] = defaultdict(dict)
        self._by_job: dict[Key, dict[tuple[str, str], StoredObject]] = defaultdict(dict)
        self._in_namespace: dict[tuple[str, str], dict[str, StoredObject]] = defaultdict(dict)
        self._environments: set[Key] = set()
        """Interactive jobs, which a job that waits for GPUs hears of; there are few, and all jobs would be much to look through."""
        self.own_namespace = ""
        self.unserved: set[str] = set()
        """Namespaces that refuse a list."""
        self._unplaced: dict[Key, Object] = {}
        """Jobs that wait for nodes, with what others have to know of them: a queue may have a thousand, too many to unpack."""
        self._contenders: dict[Key, Object] = {}
        """The same with their pods (`placing.contender`), until one of those changes."""
        self._unnamed: dict[Key, Object] = {}
        """Pods as other namespaces may hear of them, until they change: each job that waits hears of all."""
        self._obstacles: dict[Key, Notice] = {}
        self._last_deletion: dict[str, int] = defaultdict(int)
        self._newest: dict[str, int] = defaultdict(int)
        """The newest revision that was seen, by kind: Events may have a store of their own."""
        self._at_begin: dict[str, int] = {}
        """The same when the newest lists were begun: they can't be older, unless the store went back."""
        self._older: dict[str, dict[Key, Object]] = defaultdict(dict)
        """Objects that the newest list had in older versions than those that were seen."""
        self.has_gone_back = False
        """A list was older than what had been seen: the API server's store was restored from a backup."""
        self._deleted: set[str] = set()
        """uids, since the newest lists were begun: a list that is older than a deletion doesn't bring the object back."""

    def observe_write(self, kind: str, item: Mapping[str, Any]) -> set[Key]:
        """Take in the reply to a write, ahead of the watch; one of an object that was deleted meanwhile changes nothing."""
        stored = self._objects[kind].get(_place(item))
        is_known = stored is not None and stored.uid == item["metadata"]["uid"]
        if not is_known and version_of(item) <= self._last_deletion[kind]:
            return set()
        return self.observe(kind, item, deleted=False)

    def observe(self, kind: str, item: Mapping[str, Any], *, deleted: bool) -> set[Key]:
        """Take in one event; the keys of jobs that it may change. An event older than what is known changes nothing."""
        if kind == "Event" and not (
            item.get("reason") in EVENT_REASONS or _place(item) in self._objects[kind] or self._is_pull_of_a_job(item)
        ):
            return set()
        if deleted:
            self._last_deletion[kind] = max(self._last_deletion[kind], version_of(item))
            self._deleted.add(str(item["metadata"]["uid"]))
        key = _place(item)
        self._newest[kind] = max(self._newest[kind], version_of(item))
        stored = self._objects[kind].get(key)
        if stored is not None and (stored.version > version_of(item) or _brings_nothing(stored, item, deleted)):
            return set()
        if deleted and stored is not None and stored.uid != item["metadata"]["uid"]:
            return set()
        now = None if deleted else StoredObject(kind, item)
        self._put(kind, key, now)
        if kind == "Event":
            self._keep_few_events(key[0])
        if kind == "TrainingJob" and now is not None:
            self._take_in_job(key, now.item)
        if now is not None and stored is not None and now.says_the_same(stored):
            return set()
        if kind == "TrainingJob" and deleted:
            self.forget_secret(key)
        return self._concerned(kind, key, item)

    def _take_in_job(self, key: Key, job: Object) -> None:
        """Take in what other jobs need to know of this one: they decide by it."""
        if is_interactive(job):
            self._environments.add(key)
        if is_unplaced(job):
            self._unplaced[key] = {"metadata": job["metadata"], "status": {"placement": job["status"]["placement"]}}

    def _keep_few_events(self, namespace: str) -> None:
        """Drop the older half of too many."""
        events = self._in_namespace["Event", namespace]
        if len(events) > EVENTS_MAX:
            for name in sorted(events, key=lambda name: events[name].version)[: EVENTS_MAX // 2]:
                self._put("Event", (namespace, name), None)

    def begin_lists(self) -> None:
        """Lists that are asked for from here on know of every deletion, and of every change, until here."""
        self._deleted.clear()
        self._older.clear()
        self._at_begin = dict(self._newest)

    def take_in(self, kind: str, items: Iterable[Object]) -> tuple[set[Key], set[Key]]:
        """Take in a part of a list; the keys of what it has, and of the jobs that it may change."""
        listed, changed = set(), set()
        for item in items:
            listed.add(_place(item))
            try:
                if version_of(item) <= self._at_begin.get(kind, 0):
                    self._keep_older(kind, item)
                if item["metadata"]["uid"] not in self._deleted:
                    changed |= self.observe(kind, item, deleted=False)
            except Exception:  # one object that nobody thought of is no reason to know nothing of all others
                log.exception("%s %s can't be taken in", kind, "/".join(filter(None, _place(item))))
        return listed, changed

    def drop_others(self, kind: str, listed: set[Key], version: int) -> set[Key]:
        """Drop what no part of a list of this version has, unless it is newer. Return the keys of jobs that this may change.

        A list that is older than what was seen before it was asked for is of a store that went back (etcd was restored): then it is all
        there is.
        """
        if 0 < version < self._at_begin.get(kind, 0):
            return self._go_back(kind, version)
        self._last_deletion[kind] = max(self._last_deletion[kind], version)
        gone = {key: stored for key, stored in self._objects[kind].items() if key not in listed and stored.version <= version}
        for key in gone:
            self._put(kind, key, None)
        return {job for key, stored in gone.items() for job in self._concerned(kind, key, stored.item)}

    def _keep_older(self, kind: str, item: Object) -> None:
        stored = self._objects[kind].get(_place(item))
        if stored is not None and (stored.version > version_of(item) or stored.uid != item["metadata"]["uid"]):
            self._older[kind][_place(item)] = item

    def _go_back(self, kind: str, version: int) -> set[Key]:
        self.has_gone_back = True
        self._newest[kind] = self._last_deletion[kind] = version
        ahead = {key: stored for key, stored in self._objects[kind].items() if stored.version > version or key in self._older[kind]}
        for key in ahead:
            self._put(kind, key, None)
        for item in self._older[kind].values():
            self.observe(kind, item, deleted=False)
        return set(self.jobs())

    def forget_secret(self, job: Key) -> None:
        """Secrets aren't watched: what is known of them is what was written."""
        for kind, name in list(self._by_job.get(job, ())):
            if kind == "Secret":
                self._put(kind, (job[0], name), None)

    def _put(self, kind: str, key: Key, item: StoredObject | None) -> None:
        namespace, name = key
        old = self._objects[kind].pop(key, None)
        if kind == "TrainingJob":
            self._unplaced.pop(key, None)
            self._contenders.pop(key, None)
        if kind == "Pod":
            self._unnamed.pop(key, None)
        for child in (old, item) if kind in {"Pod", "StatefulSet"} else ():
            self._contenders.pop((namespace, "" if child is None else child.job), None)
        if old is not None:
            _drop(self._in_namespace, (kind, namespace), name)
            if old.job:
                _drop(self._by_job, (namespace, old.job), (kind, name))
        if item is not None:
            self._objects[kind][key] = item
            self._in_namespace[kind, namespace][name] = item
            if item.job:
                self._by_job[namespace, item.job][kind, name] = item

    def _concerned(self, kind: str, key: Key, item: Mapping[str, Any]) -> set[Key]:
        if kind == "TrainingJob":
            return {key}
        if kind in ("TrainingCluster", "Node"):
            return set(self.jobs())
        job = self._job_of_event(key[0], item) if kind == "Event" else job_of(item)
        if job:
            return {(key[0], job)}
        return {(key[0], name) for name in self._in_namespace.get(("TrainingJob", key[0]), ())}

    def _is_pull_of_a_job(self, event: Mapping[str, Any]) -> bool:
        """Return True if the Event is about an image of a job's pod. Other pods' failures, which have the same reason, are not kept."""
        is_pull = event.get("reason") == "Failed" and PULL_EVENT.match(str(event.get("message") or "")) is not None
        return is_pull and bool(self._job_of_event(str(event["metadata"].get("namespace")), event))

    def _job_of_event(self, namespace: str, event: Mapping[str, Any]) -> str:
        """The job that an Event's object belongs to; '' when that isn't known: a quota that is used up has many events, and other jobs as
        many looks at each.
        """
        about = event["involvedObject"]
        stored = self._objects.get(about.get("kind", ""), {}).get((namespace, about.get("name", "")))
        return "" if stored is None else stored.job

    def jobs(self) -> list[Key]:
        return list(self._objects["TrainingJob"])

    def uids(self) -> set[str]:
        return {stored.uid for stored in self._objects["TrainingJob"].values()}

    def job_objects(self) -> list[Object]:
        """The TrainingJobs themselves, as they are stored."""
        return list(self._all("TrainingJob"))

    def observed(self, key: Key) -> Observed | None:
        """All that is known about one job; None when there is no such job."""
        job = self._objects["TrainingJob"].get(key)
        if job is None:
            self._obstacles.pop(key, None)
            return None
        children = {child: stored.item for child, stored in self._by_job.get(key, {}).items()}
        pods = tuple(item for child, item in sorted(children.items()) if child[0] == "Pod" and is_of_gang(key[1], child[1]))
        stuck = any(map(scheduler_message, pods))
        job_object = job.item
        return Observed(
            job=job_object,
            profiles=self._all("TrainingCluster"),
            objects={child: item for child, item in children.items() if child[0] != "Pod"},
            pods=pods,
            nodes=self._all("Node"),
            sees_nodes=self.sees_nodes,
            unsettled_seconds=self.unsettled_seconds(),
            claims={name: stored.item for name, stored in self._of_namespace("PersistentVolumeClaim", key).items()},
            service_accounts=frozenset(self._of_namespace("ServiceAccount", key)),
            warnings=tuple(stored.item for stored in self._of_namespace("Event", key).values()),
            others=self._pods_of_others(key) if stuck else (),
            unused=unused(self._interactive()) if stuck else frozenset(),
            waiting=tuple(self._waiting(key)) if stuck or is_unplaced(job_object) else (),
            obstacle=self._obstacles.get(key),
        )

    def serves(self, namespace: str) -> bool:
        """Return True if this operator looks after the jobs of the namespace: it may, and the namespace has no operator of its own."""
        has_own = OPERATOR_NAME in self._in_namespace.get(("ServiceAccount", namespace), {}) and namespace != self.own_namespace
        return namespace not in self.unserved and not has_own

    def _waiting(self, key: Key) -> Iterator[Object]:
        """Other jobs that wait for nodes. What is in the status of a job that is not served may be of any time."""
        for other in self._unplaced:
            if other != key and self.serves(other[0]):
                if other not in self._contenders:
                    children = self._by_job.get(other, {}).items()
                    pods = [item.item for (kind, name), item in children if kind == "Pod" and is_of_gang(other[1], name)]
                    made = None if pods else self.item("StatefulSet", other)
                    self._contenders[other] = contender(self._unplaced[other], pods, made and made["spec"].get("template"))
                yield self._contenders[other]

    def item(self, kind: str, key: Key) -> Object | None:
        """An object by its namespace and name, as it is kept; None: it is not there."""
        stored = self._objects[kind].get(key)
        return None if stored is None else stored.item

    def gang_size(self, key: Key, uid: str) -> int:
        """Nodes that the job of this uid may have now: by its spec, its StatefulSet and its pods, at most NODES_MAX. 0: there is no such
        job.
        """
        job, stateful_set = self._objects["TrainingJob"].get(key), self._objects["StatefulSet"].get(key)
        if job is None or job.uid != uid:
            return 0
        replicas = 0 if stateful_set is None else stateful_set.item["spec"].get("replicas", 1)
        pods = sum(child[0] == "Pod" for child in self._by_job.get(key, ()))
        return min(max(job.item["spec"].get("nodes") or NODES_MAX, replicas, pods), NODES_MAX)

    def to_read(self, key: Key) -> list[tuple[str, str]]:
        """(kind, name) of this job's own children whose content wasn't kept: what a decision about the job needs of them."""
        job = key[1]
        uid = self._objects["TrainingJob"][key].uid if key in self._objects["TrainingJob"] else ""
        cut = {child: stored for child, stored in self._by_job.get(key, {}).items() if stored.is_cut and owner_uid(stored.item) == uid}
        by_name = {("StatefulSet", job), ("NetworkPolicy", job), ("Service", service_name(job)), ("ConfigMap", log_name(job))} & cut.keys()
        in_use = self._runs_in_use(key)
        runs = [child for child in cut if child[0] == "ConfigMap" and child[1].startswith(run_name(job, ""))]
        return [*sorted(by_name), *sorted(runs, key=lambda child: (child[1] in in_use, cut[child].version), reverse=True)[:CONTENTS_MAX]]

    def _runs_in_use(self, key: Key) -> set[str]:
        """Names of the frozen runs that its pods name."""
        holders = [stored.item for (kind, _), stored in self._by_job.get(key, {}).items() if kind in ("StatefulSet", "Pod")]
        hashes = {item["metadata"].get("annotations", {}).get(ANNOTATION_RUN_HASH) for item in holders}
        return {run_name(key[1], run_hash) for run_hash in hashes if run_hash}

    def _interactive(self) -> list[Object]:
        jobs = self._objects["TrainingJob"]
        self._environments &= jobs.keys()
        return [jobs[key].item for key in self._environments]

    def _all(self, kind: str) -> tuple[Object, ...]:
        return tuple(stored.item for stored in self._objects[kind].values())

    def _of_namespace(self, kind: str, job: Key) -> Mapping[str, StoredObject]:
        return self._in_namespace.get((kind, job[0]), {})

    def _pods_of_others(self, job: Key) -> tuple[Object, ...]:
        """Those of other namespaces without their names: what is decided from them is read by this job's tenant."""
        others = []
        for place, stored in self._objects["Pod"].items():
            if place[0] == job[0]:
                others += [stored.item] if stored.job != job[1] else []
            else:
                others.append(self._unnamed.get(place) or self._unnamed.setdefault(place, unnamed(stored.item)))
        return tuple(filter(is_scheduled, others))

    def set_obstacle(self, key: Key, obstacle: Notice | None) -> None:
        """Note why the last write for this job failed; None: it did not."""
        if obstacle is None:
            self._obstacles.pop(key, None)
        else:
            self._obstacles[key] = obstacle


def is_of_gang(job: str, pod: str) -> bool:
    """Return True if the pod is a node of the job by its name. Others that carry the job's labels (somebody's copies for a look inside,
    say) are no nodes, and end nothing.
    """
    begin, _, number = pod.rpartition("-")
    return begin == job and number.isdecimal()


def _drop(groups: dict[Any, dict[Any, StoredObject]], group: Any, name: Any) -> None:
    """Drop it without a trace: namespaces come and go, and anybody may make up names of jobs in labels."""
    groups[group].pop(name, None)
    if not groups[group]:
        del groups[group]


def _place(item: Mapping[str, Any]) -> Key:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _brings_nothing(stored: StoredObject, item: Mapping[str, Any], deleted: bool) -> bool:
    """The same version of the same object again, or its metadata alone where more of it is kept."""
    if deleted or stored.version == 0 or stored.version != version_of(item) or stored.uid != item["metadata"]["uid"]:
        return False
    return not stored.is_cut
