"""Fixtures of a release's tests: its files, and its images in a registry that every node of the embedded cluster reaches."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kubernetes.dynamic import DynamicClient

from cluster.conftest import api, cluster, kubectl, namespace  # noqa: F401
from lockstep.devcluster.cluster import status
from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.hosts import needs
from release import airgap, bundle, installyaml
from release.parts import Images, version
from support.clusters.built_image import built
from support.clusters.cluster_jobs import SCRIPTS, Jobs, until
from support.release.files import REGISTRY, Kubectl, done, mirror

SETTINGS = "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}}}}}\nhttp: {{addr: '{address}'}}\n"


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a release whose two images are the operator's."""
    folder = tmp_path_factory.mktemp("release")
    _need("skopeo")
    _, archive = built("operator")
    (folder / "images").mkdir()
    subprocess.run(["skopeo", "copy", "--quiet", f"docker-archive:{archive}", f"oci:{folder / 'images/operator'}:{version()}"], check=True)
    shutil.copytree(folder / "images/operator", folder / "images/trainer")
    [manifest] = json.loads((folder / "images/operator/index.json").read_text())["manifests"]
    images = Images(*(f"{REGISTRY}/lockstep-{name}:{version()}@{manifest['digest']}" for name in ("operator", "trainer")))
    for form in (installyaml, bundle, airgap):
        form.write(folder, images)
    return folder


@pytest.fixture(scope="session")
def registry(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:  # noqa: F811
    """Address of Debian's docker-registry on the loopback of this machine and of every node, where containerd asks without TLS."""
    _need("docker-registry")
    folder = tmp_path_factory.mktemp("registry")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = folder / "settings.yaml"
    settings.write_text(SETTINGS.format(folder=folder / "content", address=address))
    nodes = [default_layout().node(number).namespace for number in range(len(status(default_layout())["nodes"]))]
    with ExitStack() as stack:
        for number, inside in enumerate([[], *(["ip", "netns", "exec", node] for node in nodes)]):
            log = folder / f"{number}.log"
            command = [*inside, "docker-registry", "serve", str(settings)]
            with log.open("wb") as output:
                process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output))
            stack.callback(process.terminate)
            until("the registry listens", lambda log=log: "listening on" in log.read_text())
        yield address


@pytest.fixture(scope="session")
def mirrored(dist: Path, registry: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's files after its images were copied into that registry."""
    folder = shutil.copytree(dist, tmp_path_factory.mktemp("mirrored") / "dist")
    done = mirror(folder, f"{registry}/team", "--dest-tls-verify=false", "--quiet")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def jobs(api: DynamicClient, namespace: str, kubectl: Kubectl) -> Jobs:  # noqa: F811
    """A namespace with what a job needs beside an installation: the account of its pods and, for these jobs, their scripts."""
    jobs = Jobs(api, namespace)
    done(kubectl, "create", "serviceaccount", "ml-dev-sa", "-n", namespace)
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scripts"}, "data": SCRIPTS})
    return jobs


def _need(program: str) -> None:
    if shutil.which(program) is None:
        needs.install([program], print)
