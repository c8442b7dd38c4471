"""Fixtures of the tests that need the operator: it runs in its pod, from this checkout's code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from kubernetes import client, config, dynamic

from lockstep.api.names import OPERATOR_NAMESPACE
from support.clusters.cluster_jobs import Jobs, cluster_like_local, prepare, until
from support.clusters.installed_operator import local_objects, send

GPU = "nvidia.com/gpu"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what the operator's pods said meanwhile, and whether one was restarted."""
    report = yield
    if report.failed and "operator" in getattr(item, "fixturenames", ()):
        report.sections.append(("operator", "\n".join(_operator_says(int(call.duration) + 5))))
    return report


def _operator_says(seconds: int) -> Iterator[str]:
    try:
        with config.new_client_from_config(os.environ["KUBECONFIG"]) as connection:
            core = client.CoreV1Api(connection)
            for pod in core.list_namespaced_pod(OPERATOR_NAMESPACE).items:
                restarts = sum(status.restart_count for status in pod.status.container_statuses or ())
                yield f"{pod.metadata.name}: {restarts} restarts since {pod.metadata.creation_timestamp:%H:%M:%S}"
                yield core.read_namespaced_pod_log(pod.metadata.name, OPERATOR_NAMESPACE, since_seconds=seconds)
    except Exception as error:  # what the test has found counts
        yield f"{type(error).__name__}: {error}"


@pytest.fixture(scope="session")
def operator(cluster: Path) -> None:
    """The operator of this checkout, installed and ready. It stays, as the cluster does."""
    send(local_objects())


@pytest.fixture(scope="module")
def jobs(api: dynamic.DynamicClient, operator: None) -> Iterator[Jobs]:
    """One namespace for the jobs of this module."""
    core = client.CoreV1Api(api.client)
    namespace = core.create_namespace({"metadata": {"generateName": "lockstep-test-"}}).metadata.name
    try:
        yield prepare(api, namespace)
    finally:
        core.delete_namespace(namespace)


@pytest.fixture
def other(jobs: Jobs) -> Iterator[Jobs]:
    """A second namespace, without anything in it."""
    core = client.CoreV1Api(jobs.api.client)
    namespace = core.create_namespace({"metadata": {"generateName": "lockstep-test-"}}).metadata.name
    try:
        yield dataclasses.replace(jobs, namespace=namespace)
    finally:
        core.delete_namespace(namespace)


@pytest.fixture
def gpu_cluster(jobs: Jobs) -> Iterator[str]:
    """The name of a cluster like `local` whose nodes have one GPU, as it says."""
    with cluster_like_local(jobs, "gpus", lambda spec: spec.update(gpus={**(spec.get("gpus") or {}), "perNode": 1})) as name:
        yield name


@pytest.fixture
def gpus(jobs: Jobs) -> Iterator[list[str]]:
    """Both nodes have one GPU, as far as the scheduler knows."""
    core = client.CoreV1Api(jobs.api.client)
    nodes = sorted(node.metadata.name for node in core.list_node().items)
    path = GPU.replace("/", "~1")

    def patch(operation: dict[str, str]) -> None:
        for node in nodes:
            core.patch_node_status(node, [operation])

    patch({"op": "add", "path": f"/status/capacity/{path}", "value": "1"})
    until("the GPUs can be had", lambda: all((n.status.allocatable or {}).get(GPU) == "1" for n in core.list_node().items))
    yield nodes
    patch({"op": "remove", "path": f"/status/capacity/{path}"})
    until("the GPUs are gone", lambda: all((n.status.allocatable or {}).get(GPU) in (None, "0") for n in core.list_node().items), 60)
