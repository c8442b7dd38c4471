"""What keeps pods from running: which lists are asked for it, and what an API server that has no time for them means."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lockstep.kube.cluster import ApiError
from lockstep.plan.waiting.containers import OF_A_HELPER, OF_A_JOB
from lockstep.platforms.clusters.waits import Wait, why_pods_wait
from support.fake_cluster import FakeCluster

Object = dict[str, Any]
NO_KEY = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "key" not found'}}


def waiting(node: str | None) -> Object:
    status = {"containerStatuses": [{"name": "c", "state": NO_KEY}]} if node else {}
    return {"kind": "Pod", "metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {"nodeName": node}, "status": status}


def whys(cluster: FakeCluster, pod: Object, hints: Any = OF_A_HELPER) -> dict[str, Wait]:
    return asyncio.run(why_pods_wait(cluster.as_cluster, "ns", [pod], hints))


def test_claims_are_listed_only_for_a_pod_without_a_node() -> None:
    cluster = FakeCluster()
    cluster.refused = {"PersistentVolumeClaim": ApiError(422, "Invalid", "no")}
    assert "secret" in whys(cluster, waiting("a"))["p"].message
    with pytest.raises(ApiError):
        whys(cluster, waiting(None))


@pytest.mark.parametrize("kind", ["Event", "PersistentVolumeClaim"])
@pytest.mark.parametrize("status", [429, 500, 503, 504])
def test_while_the_api_server_has_no_time_for_lists_nothing_is_known(kind: str, status: int) -> None:
    cluster = FakeCluster()
    cluster.refused = {kind: ApiError(status, "Busy", "later")}
    assert whys(cluster, waiting(None)) == {}


def test_a_pod_that_a_command_made_has_no_hint_about_a_job_s_spec() -> None:
    assert "spec.env" in whys(FakeCluster(), waiting("a"), OF_A_JOB)["p"].message
    assert whys(FakeCluster(), waiting("a"))["p"].message.endswith("create it in the pod's namespace")
