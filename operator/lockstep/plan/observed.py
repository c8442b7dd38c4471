"""Observation of one job at one moment: plain objects as the API server has them, and the questions that reconcile may ask about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from lockstep.api import names
from lockstep.api.objects import Object, go_on_words

if TYPE_CHECKING:  # (of the models, whose import takes as long as a small verb does)
    from lockstep.plan.layers import Notice
    from lockstep_gang.contract.report import Report

REPLICAS_BY = "replicasBy"
"""A field that the operator adds to a StatefulSet: `manager` and `time` of whoever last wrote its replicas, by metadata.managedFields."""
UNREADABLE = "unreadable"
"""A field of an object that was not kept as it is: the reason, for a person."""


@dataclass(frozen=True)
class ReceivedReport:
    """The newest report of a job's coordinator, the pod that it came from, and when (seconds since the epoch)."""

    report: Report
    pod_uid: str
    received: float


@dataclass(frozen=True)
class JobObject:
    """A TrainingJob as the API server has it."""

    job: Object

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.job["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])

    @property
    def generation(self) -> int:
        return int(self.job["metadata"].get("generation", 0))

    @property
    def restart(self) -> Object:
        """spec.restart."""
        return self.job["spec"].get("restart") or {}

    @property
    def requested_retry(self) -> int:
        return int(self.restart.get("retry", 0))

    @property
    def status(self) -> Object:
        return self.job.get("status") or {}

    def status_part(self, name: str) -> Object:
        """Part of the status; empty if it has none of this name."""
        return self.status.get(name) or {}


@dataclass(frozen=True)
class Observed(JobObject):
    """A job and everything around it that decides what happens next."""

    profiles: tuple[Object, ...] = ()
    objects: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """(kind, name) → the object, for everything in the job's namespace that carries its label, except pods and Secrets."""
    pods: tuple[Object, ...] = ()
    nodes: tuple[Object, ...] = ()
    sees_nodes: bool = True
    """False: the operator has no right to see any, so that `nodes` is empty."""
    unsettled_seconds: float = 0.0
    """Seconds until a Node may be taken for lost again: the API server was away, and silent Nodes are those that could not reach it either.
    """
    claims: Mapping[str, Object] = field(default_factory=dict)
    sees_claims: bool = True
    """False: the asker has no right to see any, so that `claims` is empty."""
    service_accounts: frozenset[str] = frozenset()
    warnings: tuple[Object, ...] = ()
    """Events of type Warning in the namespace."""
    others: tuple[Object, ...] = ()
    """Pods of anybody else that have a node, looked at while a pod of this job has none: they may hold what it waits for. Those whose names
    the reader may not know have none (`nodes.unnamed`).
    """
    unused: frozenset[tuple[str, str]] = frozenset()
    """(namespace, name) of dev environments in which nothing runs, while `others` are looked at."""
    waiting: tuple[Object, ...] | None = None
    """Other jobs that wait for nodes (`placing.contender`), looked at while this one has no node for some of its pods; None: nobody can see
    them.
    """
    hosts: tuple[str, ...] = ()
    """Names of the hosts by node, where a job runs without pods."""
    obstacle: Notice | None = None
    """Reason why the last attempt to write an object of the job failed."""

    @cached_property
    def nodes_by_name(self) -> Mapping[str, Object]:
        return {str(node["metadata"]["name"]): node for node in self.nodes}

    @property
    def judged_nodes(self) -> Mapping[str, Object]:
        """`nodes_by_name`, as far as what they say of themselves can be believed."""
        return {} if self.unsettled_seconds > 0 else self.nodes_by_name

    @property
    def stateful_set(self) -> Object | None:
        return self.objects.get(("StatefulSet", self.name))

    @property
    def own_stateful_set(self) -> Object | None:
        """The StatefulSet, unless it is somebody else's."""
        item = self.stateful_set
        return item if item is not None and owner_uid(item) == self.uid else None

    @property
    def replicas(self) -> int:
        """Pods that the StatefulSet is to have."""
        return 0 if self.stateful_set is None else int(self.stateful_set["spec"].get("replicas", 1))

    @property
    def scaled_by(self) -> Object:
        """`manager` and `time` of somebody else who last wrote how many pods the job's own StatefulSet is to have; empty: nobody else, or
        not known.
        """
        by: Object = (self.own_stateful_set or {}).get(REPLICAS_BY) or {}
        return {} if by.get("manager") == names.OPERATOR_NAME else by

    @property
    def at_zero(self) -> bool:
        return not self.pods and self.replicas == 0

    def pod(self, node: int) -> Object | None:
        return self._pods_by_name.get(names.pod_name(self.name, node))

    @cached_property
    def _pods_by_name(self) -> Mapping[str, Object]:
        return {str(pod["metadata"]["name"]): pod for pod in self.pods}

    def node_name(self, node: int | None) -> str | None:
        """Name of the Node that this node's pod is on, or of its host; None if there is no such pod, or it has no Node yet."""
        if node is not None and 0 <= node < len(self.hosts):
            return self.hosts[node]
        pod = None if node is None else self.pod(node)
        return None if pod is None else pod["spec"].get("nodeName")

    def events_of(self, uid: str) -> list[Object]:
        """Warnings about the object of this uid, newest first."""
        return sorted((event for event in self.warnings if event["involvedObject"].get("uid") == uid), key=event_time, reverse=True)


def event_time(event: Object) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def owner_uid(item: Object) -> str | None:
    return next((str(o["uid"]) for o in item["metadata"].get("ownerReferences", []) if o.get("controller")), None)


def is_terminating(item: Object) -> bool:
    return "deletionTimestamp" in item["metadata"]


def current_report(observed: Observed, received: ReceivedReport | None) -> ReceivedReport | None:
    """The report, while the pod that sent it is there: an older start of the same job says nothing about this one."""
    pod = observed.pod(0)
    if received is None or pod is None or pod["metadata"]["uid"] != received.pod_uid:
        return None
    return received


def start_anew(observed: Observed) -> str:
    """The two commands that start a job that has pods from zero again."""
    where = f"{observed.name} -n {observed.namespace}"
    return f"`lockstep stop {where}`, then `lockstep resume {where}` to {go_on_words(observed.job)}"
