"""Fixtures of the tests that need a cluster: an embedded one that is theirs alone, else the one that $LOCKSTEP_TEST_KUBECONFIG names.

They mostly wait, so `make test-cluster` runs them on two embedded clusters side by side: every worker of pytest-xdist has one to itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, dynamic

from lockstep.cli.clusters.devcluster import bring_up
from lockstep.devcluster import binary
from lockstep.environments import cache_root
from support.clusters.own_cluster import GIVEN, GO, own_number
from support.side_by_side import Parts, file_of, longest_first

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
WORKERS = 2
DEPLOYMENTS = ("test_front_door", "test_seed_004", "test_deploy", "test_rails", "test_skew")
"""One worker runs them: they write down in the checkout which cluster was deployed last."""
LONGEST = (
    *DEPLOYMENTS, "test_training", "test_drills", "test_devcluster", "test_image", "test_upgrade", "test_retry", "test_verbs", "test_words",
        "test_interactive", "test_jobs", "test_rights",
    "test_devcluster_pods", "test_stops", "test_notebook_and_debugger", "test_why", "test_shell_and_editors", "test_models", "test_fabric",
        "test_files",
)  # fmt: skip


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a cluster that somebody gives is only one."""
    return 1 if GIVEN in os.environ else WORKERS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items, LONGEST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Parts:
    return Parts(config, log, lambda nodeid: "deployments" if (name := file_of(nodeid)) in DEPLOYMENTS else name)


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[Path]:
    """The administrator's kubeconfig, which $KUBECONFIG names as long as the tests run. An embedded cluster goes with them, its claims
    included.
    """
    given = os.environ.get(GIVEN)
    with pytest.MonkeyPatch.context() as patch, nullcontext() if given else own_number():
        for name, value in GO.items():
            patch.setenv(name, value)
        path = Path(given) if given else bring_up()
        patch.setenv("KUBECONFIG", str(path))
        patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))  # it has read the variable already
        yield path


@pytest.fixture(scope="session")
def api(cluster: Path) -> Iterator[dynamic.DynamicClient]:
    """A client of every kind that the cluster has, as administrator."""
    with config.new_client_from_config(str(cluster)) as connection:
        yield dynamic.DynamicClient(connection)


@pytest.fixture
def namespace(api: dynamic.DynamicClient) -> Iterator[str]:
    """The name of a namespace that only this test uses. It is deleted afterwards, with all that is in it."""
    core = client.CoreV1Api(api.client)
    name = core.create_namespace({"metadata": {"generateName": "lockstep-test-"}}).metadata.name
    try:
        yield name
    finally:
        core.delete_namespace(name)


@pytest.fixture(scope="session")
def kubectl(cluster: Path) -> Kubectl:
    """Runs kubectl as administrator: `kubectl("get", "nodes", input=...)`; never raises, so that a test can assert a refusal."""
    program = shutil.which("kubectl")
    command = [program] if program else [str(binary.folder(cache_root()) / binary.MULTI_CALL), "kubectl"]

    def run(*arguments: str, input: str | None = None, timeout_seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--kubeconfig", str(cluster), *arguments],
            input=input, capture_output=True, text=True, check=False, timeout=timeout_seconds,
        )  # fmt: skip

    return run
