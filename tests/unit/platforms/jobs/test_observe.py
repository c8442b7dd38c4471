"""What is around a job, as far as the account that asks may see it."""

from __future__ import annotations

import asyncio
from typing import Any

from lockstep.kube.cluster import ApiError
from lockstep.plan.observed import Observed
from lockstep.plan.waiting.unscheduled import why_waiting
from lockstep.platforms.jobs.observe import JobObserver
from support.fake_cluster import FakeCluster

Object = dict[str, Any]
JOB = {"metadata": {"name": "x", "namespace": "ns", "uid": "j"}, "spec": {}}
MESSAGE = '0/1 nodes are available: persistentvolumeclaim "data" not found'


def waiting_for_a_claim() -> Object:
    scheduled = {"type": "PodScheduled", "status": "False", "message": MESSAGE}
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    metadata = {"name": "x-0", "namespace": "ns", "uid": "p", "labels": {"lockstep.dev/job": "x"}}
    return {"kind": "Pod", "metadata": metadata, "spec": {"volumes": volumes, "containers": []}, "status": {"conditions": [scheduled]}}


def observed(cluster: FakeCluster) -> Observed:
    async def look() -> Observed:
        return await JobObserver(cluster.as_cluster).at(JOB)

    return asyncio.run(look())


def test_a_claim_that_may_not_be_seen_is_not_called_missing() -> None:
    cluster = FakeCluster(waiting_for_a_claim())
    missing = why_waiting(observed(cluster))
    assert missing is not None and missing.message.startswith("claim data does not exist")
    cluster.refused = {"PersistentVolumeClaim": ApiError(403, "Forbidden", "no")}
    unseen = why_waiting(observed(cluster))
    assert unseen is not None and "claim data" not in unseen.message


def test_a_pod_without_a_node_is_explained_in_a_cluster_that_knows_no_training_jobs() -> None:
    cluster = FakeCluster(waiting_for_a_claim())
    cluster.refused = {"TrainingJob": ApiError(404, "NotFound", "the server could not find the requested resource")}
    assert observed(cluster).unused == frozenset()


async def test_what_is_around_several_jobs_is_listed_once() -> None:
    asked: list[tuple[str, str]] = []

    class Listing(FakeCluster):
        async def list(self, kind: str, namespace: str | None = None, query: Any = None) -> Object:
            asked.append((kind, str(query)))
            return await super().list(kind, namespace, query)

    observer = JobObserver(Listing().as_cluster)
    await asyncio.gather(*(observer.at({**JOB, "metadata": {**JOB["metadata"], "name": name}}) for name in "xyz"))
    assert len(asked) == len(set(asked)) and [kind for kind, _ in asked].count("Event") == 1
