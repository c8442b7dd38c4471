"""Fixtures of the tests that need the operator: it runs in its pod, from this checkout's code."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client, dynamic

from cluster_jobs import Jobs, prepare
from lockstep.api.clusterfile import parse_cluster_file
from lockstep.devcluster.layout import default_layout
from lockstep.devcluster.python_volume import publish_code
from lockstep.platforms.kubernetes.cluster import Cluster
from lockstep.platforms.kubernetes.install import install, operator_objects

CHECKOUT = Path(__file__).resolve().parents[3]
IMAGE = "localhost/lockstep/base:1"


@pytest.fixture(scope="session")
def operator(cluster: Path) -> None:
    """The operator of this checkout, installed and ready. It stays, as the cluster does."""
    revision = publish_code(default_layout().python_volume).name
    text = (CHECKOUT / "clusters" / "local.yaml").read_text()
    profile = parse_cluster_file(text, "local.yaml").profile
    objects = operator_objects(profile, IMAGE, namespace="lockstep", manifests=CHECKOUT / "manifests", revision=revision)

    async def send() -> None:
        async with await Cluster.connect() as connection:
            await install(connection, objects, lambda line: None)

    asyncio.run(send())


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
