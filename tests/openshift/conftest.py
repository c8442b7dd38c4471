"""Fixtures of the tests on OpenShift: `make test-openshift SOURCE=… OC=…` names the sources from which its control plane and `oc` are
built.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from cluster.conftest import api, kubectl, namespace  # noqa: F401
from lockstep.api.errors import ConfigError
from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.python_volume import publish_code
from openshift.control_plane import oc_program, openshift, versions
from support.checkout import ROOT
from support.clusters.own_cluster import GO, own_number
from support.in_process import lockstep

Typed = Callable[..., subprocess.CompletedProcess[str]]
RUNS: list[str] = []
"""What runs, for the end of the output."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("OpenShift")
    terminalreporter.write("\n".join([*RUNS, ""]))


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `oc`, and with `kubectl` as the same program, as OpenShift ships both."""
    folder = tmp_path_factory.mktemp("bin")
    try:
        for name in ("oc", "kubectl"):
            (folder / name).symlink_to(oc_program())
    except ConfigError as error:
        pytest.exit(str(error), 2)
    return folder


@pytest.fixture(scope="session")
def oc(programs: Path) -> Typed:
    """Runs the real `oc`, as administrator where the cluster is up: `oc("get", "nodes", input=...)`; never raises, so that a test can
    assert a refusal.
    """

    def run(*arguments: str, input: str | None = None, timeout_seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(programs / "oc"), *arguments], input=input, capture_output=True, text=True, check=False, timeout=timeout_seconds
        )

    return run


@pytest.fixture(scope="session")
def cluster(programs: Path) -> Iterator[Path]:
    """The administrator's kubeconfig of an embedded cluster as OpenShift, which $KUBECONFIG names as long as the tests run. They and
    `lockstep` are on $PATH.
    """
    with pytest.MonkeyPatch.context() as patch, own_number():
        for name, value in GO.items():
            patch.setenv(name, value)
        patch.setenv("PATH", f"{programs}:{sys.prefix}/bin:{os.environ['PATH']}")
        try:
            with openshift() as path:
                patch.setenv("KUBECONFIG", str(path))
                patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))  # it has read the variable already
                RUNS.extend(versions())
                yield path
        except ConfigError as error:
            pytest.exit(str(error), 2)


@pytest.fixture(scope="session")
def cluster_file(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded cluster's file for this one: `openshift` in place of `local`, and of the platform."""
    described = yaml.safe_load((ROOT / "clusters" / "local.yaml").read_text())
    described["cluster"] |= {"name": "openshift", "platform": "openshift", "api": default_layout().gateway}
    path = tmp_path_factory.mktemp("clusters") / "openshift.yaml"
    path.write_text(yaml.safe_dump(described))
    return path


@pytest.fixture(scope="session")
def operator(cluster_file: Path) -> None:
    """The operator of this checkout, deployed by its administrator, without a dev environment. It stays, as the cluster does."""
    publish_code(default_layout().python_volume)
    done = lockstep("deploy", str(cluster_file), "--no-dev")
    assert done.returncode == 0, done.stdout + done.stderr
