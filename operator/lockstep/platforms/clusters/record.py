"""Record on the cluster of what the last deployment and the one before it had sent: what `lockstep cluster rollback` goes back to.

CRDs, namespaces and claims are not in it: those are never put back, since an older definition would drop fields of the jobs
that are there.
"""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass, replace
from typing import Any

from lockstep.api.names import APP, LABEL_MANAGED_BY, LABEL_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import DEFINITION, Object
from lockstep.kube.cluster import Cluster
from lockstep.plan.ship.deploy import CLUSTER, ONLY_CREATED
from lockstep.platforms.clusters.install import FIELD_MANAGER

NAME = "lockstep-deployed"
_FIELDS = ("current", "previous")
_SUFFIX = ".json.gz"


@dataclass(frozen=True)
class Deployment:
    """Objects that one deployment sent."""

    title: str
    """Line for people: which cluster file, which mode, which version, when."""
    objects: tuple[Object, ...]
    worked: bool = False
    """The operator was ready after it."""

    @property
    def clusters(self) -> set[str]:
        """TrainingClusters that it sent."""
        return {str(item["metadata"]["name"]) for item in self.objects if item["kind"] == CLUSTER}


@dataclass(frozen=True)
class Record:
    """The deployment that is there, and the one that it replaced."""

    current: Deployment | None = None
    previous: Deployment | None = None

    def followed_by(self, new: Deployment) -> Record:
        """One that never worked is nothing to go back to, and the same one again replaces nothing."""
        if self.current is None:
            return Record(new, self.previous)
        if self.current.objects == new.objects:
            return Record(replace(new, worked=self.current.worked), self.previous)
        return Record(new, self.current if self.current.worked else self.previous)

    def confirmed(self) -> Record:
        return self if self.current is None else replace(self, current=replace(self.current, worked=True))

    def without(self, cluster: str) -> Record:
        """Nothing that would bring this TrainingCluster back is gone back to."""
        return self if self.previous is None or cluster not in self.previous.clusters else replace(self, previous=None)

    def turned_back(self) -> Record:
        return Record(self.previous, self.current)


def deployment_of(objects: list[Object], title: str) -> Deployment:
    return Deployment(title, tuple(item for item in objects if item["kind"] not in (DEFINITION, *ONLY_CREATED)))


async def read_record(cluster: Cluster, namespace: str = OPERATOR_NAMESPACE) -> Record:
    """Raises ApiError where it may not be read."""
    record = await cluster.get("ConfigMap", namespace, NAME)
    data = (record or {}).get("binaryData") or {}
    return Record(*(_unpacked(data[f"{name}{_SUFFIX}"]) if f"{name}{_SUFFIX}" in data else None for name in _FIELDS))


async def write_record(cluster: Cluster, record: Record, namespace: str = OPERATOR_NAMESPACE) -> None:
    deployments = {name: getattr(record, name) for name in _FIELDS}
    item = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": NAME, "namespace": namespace, "labels": {LABEL_NAME: APP, LABEL_MANAGED_BY: APP}},
        "data": {name: deployment.title for name, deployment in deployments.items() if deployment is not None},
        "binaryData": {f"{name}{_SUFFIX}": _packed(deployment) for name, deployment in deployments.items() if deployment is not None},
    }
    await cluster.apply(item, manager=FIELD_MANAGER)


def _packed(deployment: Deployment) -> str:
    body = {"said": deployment.title, "objects": deployment.objects, "worked": deployment.worked}
    return base64.b64encode(gzip.compress(json.dumps(body).encode(), mtime=0)).decode()


def _unpacked(text: str) -> Deployment:
    body: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(text)))
    return Deployment(body["said"], tuple(body["objects"]), body["worked"])
