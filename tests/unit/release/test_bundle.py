"""The OLM bundle: nothing of the operator's objects is lost, and what OLM makes of it has the operator's rights, no more and no less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.api.objects import Object
from lockstep.platforms.clusters.install import kustomized, read_objects
from release import bundle
from release.parts import Images
from support.checkout import ROOT
from support.release.files import REGISTRY

IMAGES = Images(*(f"{REGISTRY}/lockstep-{name}:0.1.0@sha256:{'0' * 64}" for name in ("operator", "trainer")))
BASE = ROOT / "manifests/operator/base"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dist = tmp_path_factory.mktemp("release")
    bundle.write(dist, IMAGES)
    return dist / "bundle"


def manifests(folder: Path) -> list[Object]:
    return [item for path in sorted((folder / "manifests").iterdir()) for item in read_objects(path)]


def csv(folder: Path) -> Object:
    return next(item for item in manifests(folder) if item["kind"] == "ClusterServiceVersion")


def called(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def test_the_account_has_the_rights_of_the_manifests_in_the_cluster(folder: Path) -> None:
    roles = [item["rules"] for item in read_objects(BASE / "clusterrole.yaml") if item["kind"] == "ClusterRole"]
    strategy = csv(folder)["spec"]["install"]["spec"]
    assert [permission["rules"] for permission in strategy["clusterPermissions"]] == roles and len(roles) == 2
    assert {permission["serviceAccountName"] for permission in strategy["clusterPermissions"]} == {"lockstep-operator"}
    assert strategy["deployments"][0]["spec"]["template"]["spec"]["serviceAccountName"] == "lockstep-operator"


def test_the_account_s_rights_in_its_namespace_stay_there(folder: Path) -> None:
    """OLM gives what is in `permissions` in all namespaces, when it installs the operator for all of them."""
    assert "permissions" not in csv(folder)["spec"]["install"]["spec"]
    expected = {called(item): item for item in read_objects(BASE / "role.yaml")}
    made = {called(item): item for item in manifests(folder) if item["kind"] in ("Role", "RoleBinding")}
    assert set(made) == set(expected) and ("Role", "lockstep-operator") in made
    for key, item in made.items():
        assert "namespace" not in item["metadata"]
        assert {**item, "metadata": {**item["metadata"], "namespace": "lockstep-system"}} == expected[key]


@pytest.mark.parametrize("platform", ["kubernetes", "openshift"])
def test_every_object_is_in_the_bundle_or_applied_before_it(folder: Path, platform: str) -> None:
    version = csv(folder)
    by_olm = {("Deployment", version["spec"]["install"]["spec"]["deployments"][0]["name"]), ("ServiceAccount", "lockstep-operator")}
    by_olm |= {
        (kind, name) for kind in ("ClusterRole", "ClusterRoleBinding") for name in ("lockstep-operator", "lockstep-operator-cluster")
    }
    before = {called(item) for item in read_objects(folder / bundle.BEFORE[platform])}
    beside = {called(item) for item in manifests(folder)}
    expected = {called(item) for item in kustomized(ROOT / "manifests/operator/overlays" / platform)}
    assert expected <= by_olm | before | beside
    assert not before & beside and not by_olm & (before | beside) and before <= expected


def test_the_bundle_has_only_kinds_that_olm_installs(folder: Path) -> None:
    kinds = {item["kind"] for item in manifests(folder)} - {"ClusterServiceVersion", "CustomResourceDefinition"}
    assert kinds == {"Role", "RoleBinding", "ClusterRole", "ConfigMap", "Service", "PodDisruptionBudget"}


def test_all_images_are_named_by_digest(folder: Path) -> None:
    version = csv(folder)
    assert {item["image"] for item in version["spec"]["relatedImages"]} == {IMAGES.operator, IMAGES.trainer}
    [container] = version["spec"]["install"]["spec"]["deployments"][0]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == IMAGES.operator
    assert {"name": "LOCKSTEP_AGENT_IMAGE", "value": IMAGES.operator} in container["env"]


def test_a_release_without_the_trainer_names_no_image_of_it(tmp_path: Path) -> None:
    bundle.write(tmp_path, Images(IMAGES.operator, ""))
    assert [item["name"] for item in csv(tmp_path / "bundle")["spec"]["relatedImages"]] == ["operator"]


def test_examples_are_those_of_the_checkout(folder: Path) -> None:
    kinds = {item["kind"]: item for item in json.loads(csv(folder)["metadata"]["annotations"]["alm-examples"])}
    assert kinds["TrainingJob"] == read_objects(ROOT / bundle.JOB)[0]
    assert kinds["TrainingCluster"]["metadata"]["name"] == Path(bundle.CLUSTER).stem
    assert set(kinds) == {item["kind"] for item in csv(folder)["spec"]["customresourcedefinitions"]["owned"]}


def test_the_image_of_the_bundle_is_labelled_as_its_annotations_say(folder: Path) -> None:
    [annotations] = read_objects(folder / "metadata/annotations.yaml")
    labels = [line.removeprefix("LABEL ") for line in (folder / "bundle.Dockerfile").read_text().splitlines() if line.startswith("LABEL ")]
    assert dict(label.split("=") for label in labels) == annotations["annotations"] and len(labels) == 6
