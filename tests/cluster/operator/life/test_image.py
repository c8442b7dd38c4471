"""Images, built as for any other cluster, under a user id that no image knows: the operator, with nothing from a volume, and the
documentation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from lockstep.api.cluster import TrainingCluster
from lockstep.devcluster.cluster import status
from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.node import ctr, import_image
from support.checkout import ROOT
from support.clusters.built_image import built
from support.clusters.cluster_jobs import Jobs, until
from support.clusters.installed_operator import local_objects, local_profile, objects_of, send

PROFILE = "from-image"
USER = 1_000_660_000  # of the kind that OpenShift gives a namespace, always with group 0
FORBIDDEN = {
    "sh", "bash", "dash", "ash", "busybox", "apt", "apt-get", "dpkg", "rpm", "dnf", "microdnf", "yum", "apk", "pip", "pip3", "perl", "env",
}  # fmt: skip
Kubectl = Callable[..., subprocess.CompletedProcess[str]]
# Run in the operator's container.
LOOK = """
import importlib.metadata, json, lockstep, os, sys
def writes(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
print(json.dumps({
    "ids": [os.getuid(), os.getgid()], "version": importlib.metadata.version("lockstep-trainer"), "code": lockstep.__file__,
    "compiled": os.path.exists(lockstep.__cached__), "path": os.environ.get("PYTHONPATH"),
    "writes": [path for path in ("/x", "/opt/venv/x", "/tmp/x") if writes(path)],
}))
"""


@pytest.fixture(scope="module")
def image(jobs: Jobs) -> Iterator[str]:
    """The built image, and the operator running from it; afterwards it is as all other tests want it, and the nodes forget the image."""
    with _on_nodes("operator") as reference:
        try:
            send(_from_image(reference))
            yield reference
        finally:
            send([item for item in local_objects() if item["kind"] == "Deployment"])
            jobs.api.resources.get(api_version="lockstep.dev/v1alpha1", kind="TrainingCluster").delete(name=PROFILE)


@contextmanager
def _on_nodes(image: str) -> Iterator[str]:
    """The built image's name; every node has it until the end of the block."""
    reference, archive = built(image)
    nodes = [default_layout().node(number) for number in range(len(status(default_layout())["nodes"]))]
    for node in nodes:
        import_image(node, archive)
    try:
        yield reference
    finally:
        for node in nodes:
            subprocess.run([*ctr(node), "images", "remove", "--sync", reference], capture_output=True, check=False)


def _from_image(reference: str) -> list[dict[str, Any]]:
    """The operator's Deployment, and a cluster whose pods mount no Python environment: as on a cluster of somebody's own."""
    profile = _without_volume(local_profile())
    sent = [item for item in objects_of(profile, reference) if item["kind"] in ("Deployment", "TrainingCluster")]
    for item in sent:
        if item["kind"] == "Deployment":
            item["spec"]["template"]["spec"]["securityContext"] |= {"runAsUser": USER, "runAsGroup": 0}
        else:
            item["metadata"] = {"name": PROFILE}
    return sent


def _without_volume(profile: TrainingCluster) -> TrainingCluster:
    env = [variable for variable in profile.spec.pod.env if variable.name != "PYTHONPATH"]
    pod = profile.spec.pod.model_copy(update={"volumes": [], "env": env})
    return profile.model_copy(update={"spec": profile.spec.model_copy(update={"pod": pod})})


def test_the_operator_of_the_image_needs_no_user_of_its_own_and_no_folder_to_write_to(image: str, kubectl: Kubectl) -> None:
    seen = json.loads(kubectl("exec", "-n", "lockstep-system", "deployment/lockstep-operator", "--", "python3", "-c", LOOK).stdout)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert seen == {
        "ids": [USER, 0], "version": version, "code": seen["code"], "compiled": True, "path": None, "writes": ["/tmp/x"],  # noqa: S108
    }  # fmt: skip
    assert seen["code"].startswith("/opt/venv/")


def test_no_layer_of_the_operator_s_image_has_a_shell_or_a_package_manager() -> None:
    programs = {}
    with tarfile.open(built("operator")[1]) as archive:
        [manifest] = json.load(_file(archive, "manifest.json"))
        config = json.load(_file(archive, manifest["Config"]))
        for name in manifest["Layers"]:
            with tarfile.open(fileobj=_file(archive, name)) as layer:
                programs |= {member.name: member for member in layer if (member.isfile() and member.mode & 0o111) or member.issym()}
    names = {Path(name).name for name in programs}
    assert "python3" in names and not names & FORBIDDEN, names & FORBIDDEN
    assert not [name for name, member in programs.items() if member.mode & 0o6000]
    assert config["config"]["User"] == "65532:0"


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    content = archive.extractfile(name)
    assert content is not None
    return content


def test_a_job_runs_with_the_agent_that_the_image_brings(image: str, jobs: Jobs) -> None:
    jobs.start("from-image", "ok.py", cluster=PROFILE)
    jobs.until_condition("from-image", "Complete", "True", "Complete")
    made = jobs.get("StatefulSet", "from-image", "apps/v1") or {}
    [agent] = made["spec"]["template"]["spec"]["initContainers"]
    assert agent["image"] == image
    assert "PYTHONPATH" not in {variable["name"] for variable in agent["env"]}
    until("the pods are gone", lambda: not jobs.pods("from-image"))


def test_the_documentation_s_image_serves_the_site_and_writes_nothing(jobs: Jobs, kubectl: Kubectl) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts/docs.py")], check=True)
    with _on_nodes("docs") as reference:
        restricted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        container = {"name": "docs", "image": reference, "securityContext": restricted}
        user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}}
        jobs.create({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "docs"},
            "spec": {"containers": [container], "securityContext": user, "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 0},
        })  # fmt: skip
        page = f"/api/v1/namespaces/{jobs.namespace}/pods/docs:8080/proxy/how-to/quick-start.html"
        until("the site answers", lambda: kubectl("get", "--raw", page).returncode == 0)
        assert "<title>Quick start" in kubectl("get", "--raw", page).stdout
        assert kubectl("delete", "pod", "docs", "-n", jobs.namespace).returncode == 0
