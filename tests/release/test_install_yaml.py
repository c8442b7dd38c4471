"""install.yaml on a real cluster: as kustomize has it, applied as docs/releases.md says, again, removed, and applied anew."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.objects import Object
from lockstep.devcluster.images import BASE
from lockstep.platforms.clusters.install import read_objects
from support.checkout import ROOT
from support.clusters.cluster_jobs import Jobs, until
from support.clusters.installed_operator import local_objects, send
from support.in_process import lockstep
from support.release.files import REGISTRY, Kubectl, done, run_to_its_end, until_operates

pytestmark = pytest.mark.long
CHANGING = ("resourceVersion", "managedFields")


@pytest.fixture
def files(mirrored: Path, kubectl: Kubectl) -> Iterator[tuple[str, ...]]:
    """Arguments for the two files; everything is removed afterwards."""
    yield "-f", str(mirrored / "crds.yaml"), "-f", str(mirrored / "install.yaml")
    kubectl("delete", "trainingjobs", "--all", "--all-namespaces")
    for name in ("install.yaml", "crds.yaml"):
        kubectl("delete", "--ignore-not-found", "-f", str(mirrored / name))


def by_name(objects: Iterable[Object]) -> dict[tuple[str, str], Object]:
    return {(item["kind"], item["metadata"]["name"]): item for item in objects}


def stored(kubectl: Kubectl, files: tuple[str, ...]) -> list[Object]:
    """Objects of the files without what the cluster writes itself: status, counters and the Lease."""
    items = json.loads(done(kubectl, "get", *files, "-o", "json"))["items"]
    for item in items:
        item.pop("status", None)
        item["metadata"] = {key: value for key, value in item["metadata"].items() if key not in CHANGING}
    return [item for item in items if item["kind"] != "Lease"]


def pods(jobs: Jobs, name: str) -> list[tuple[str, Any]]:
    return [(pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in jobs.pods(name)]


@pytest.mark.parametrize("platform, name", [("kubernetes", "install.yaml"), ("openshift", "install-openshift.yaml")])
def test_the_file_has_what_kustomize_makes_of_the_manifests(dist: Path, kubectl: Kubectl, platform: str, name: str) -> None:
    image = next(line.split()[1] for line in (dist / "images.txt").read_text().splitlines() if line.startswith("images/operator "))
    text = done(kubectl, "kustomize", str(ROOT / "manifests/operator/overlays" / platform))
    expected = yaml.safe_load_all(re.sub(r"(image|value): lockstep-operator\n", rf"\1: {image}\n", text))
    lasting = [item for item in read_objects(dist / "crds.yaml") if item["kind"] == "Namespace"]
    assert by_name([*lasting, *read_objects(dist / name)]) == by_name(expected) and image.startswith(REGISTRY)


@pytest.mark.parametrize("options", [(), ("--server-side",)])
def test_one_line_installs_the_operator_and_a_second_time_it_changes_nothing(
    options: tuple[str, ...], files: tuple[str, ...], jobs: Jobs, kubectl: Kubectl
) -> None:
    done(kubectl, "apply", *options, *files)
    until_operates(kubectl)
    until("the operator's authority is known", lambda: "data" in json.loads(
        done(kubectl, "get", "configmap", "lockstep-operator-ca", "-n", "lockstep-system", "-o", "json")))  # fmt: skip
    before = stored(kubectl, files)
    done(kubectl, "apply", *options, *files)
    assert stored(kubectl, files) == before
    run_to_its_end(jobs)


def test_removing_the_operator_by_its_file_leaves_jobs_that_run_and_the_next_one_hears_them(
    files: tuple[str, ...], mirrored: Path, jobs: Jobs, kubectl: Kubectl
) -> None:
    def step() -> int:
        return int(((jobs.job("runs").get("status") or {}).get("trainer") or {}).get("step") or 0)

    done(kubectl, "apply", *files)
    until_operates(kubectl)
    jobs.start("runs", "steps.py", image=BASE)
    until("a report of the job", step)
    before, reached = pods(jobs, "runs"), step()
    done(kubectl, "delete", "-f", str(mirrored / "install.yaml"))
    assert kubectl("get", "deployment", "lockstep-operator", "-n", "lockstep-system").returncode != 0
    assert jobs.get("PersistentVolumeClaim", "ml-dev-workspace") and pods(jobs, "runs") == before and len(before) == 2
    done(kubectl, "apply", *files)
    until_operates(kubectl)
    until("a later report of the job", lambda: step() > reached)
    assert pods(jobs, "runs") == before


def test_it_takes_over_the_operator_of_a_deployment_which_takes_it_over_in_turn_with_its_image(
    files: tuple[str, ...], jobs: Jobs, kubectl: Kubectl, tmp_path: Path
) -> None:
    def images() -> set[str]:
        return set(done(kubectl, "get", "deployments", "-A", "-o", "jsonpath={.items[*].spec.template.spec.containers[*].image}").split())

    send(local_objects())
    done(kubectl, "delete", "trainingcluster", "local")
    before = images()
    done(kubectl, "apply", *files)
    until_operates(kubectl)
    after = images()
    assert len(after) == 1 and after != before
    described = yaml.safe_load((ROOT / "clusters/local.yaml").read_text())
    described["cluster"] |= {"name": "team", "namespace": jobs.namespace}
    described["pod"] = {}
    (tmp_path / "team.yaml").write_text(yaml.safe_dump(described))
    told = lockstep("deploy", str(tmp_path / "team.yaml"), "--no-dev", "--force")
    assert told.returncode == 0, told.stdout + told.stderr
    assert images() == after
    run_to_its_end(jobs)
