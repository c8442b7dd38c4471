"""Files for `kubectl apply`: all objects of the operator, its image by digest, and CRDs where no removal of the operator takes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.api.errors import Failed
from lockstep.api.files.yamltext import load_all_yaml
from lockstep.api.objects import Object
from lockstep.platforms.clusters.install import kustomized, read_objects
from release import installyaml
from release.parts import Images
from support.checkout import ROOT
from support.release.files import REGISTRY

OPERATOR = f"{REGISTRY}/lockstep-operator:0.1.0@sha256:{'0' * 64}"
IMAGES = Images(OPERATOR, "")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    installyaml.write(folder, IMAGES)
    return folder


def with_image(text: str) -> list[Object]:
    """The objects of manifests in which the image stands for its placeholder, by other means than the release's."""
    return load_all_yaml(re.sub(r"((?:image|value): )lockstep-operator\b", rf"\g<1>{OPERATOR}", text))


@pytest.mark.parametrize("platform", ["kubernetes", "openshift"])
def test_install_yaml_has_every_object_of_the_kustomization_with_the_image_by_its_digest(dist: Path, platform: str) -> None:
    [deployment] = with_image((ROOT / "manifests/operator/base/deployment.yaml").read_text())
    objects = kustomized(ROOT / "manifests/operator/overlays" / platform)
    assert read_objects(dist / installyaml.FILES[platform]) == [
        deployment if item["kind"] == "Deployment" else item for item in objects if item["kind"] != "Namespace"
    ]


def test_crds_and_the_namespace_with_the_operator_s_keys_are_in_a_file_of_their_own(dist: Path) -> None:
    manifests = [*sorted((ROOT / "manifests/crds").glob("*.yaml")), ROOT / "manifests/operator/base/namespace.yaml"]
    assert read_objects(dist / installyaml.CRDS) == [item for path in manifests for item in read_objects(path)]
    for name in installyaml.FILES.values():
        assert not {item["kind"] for item in read_objects(dist / name)} & {"CustomResourceDefinition", "Namespace"}


def test_a_default_that_is_a_text_is_no_number_to_any_reader(dist: Path) -> None:
    assert "default: '2e-4'" in (dist / installyaml.CRDS).read_text()


def test_the_same_images_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    again = installyaml.write(tmp_path, IMAGES)
    assert [path.read_bytes() for path in again] == [(dist / path.name).read_bytes() for path in again] and len(again) == 3


@pytest.mark.parametrize("image", ["", "registry.example.com/lockstep/lockstep-operator:0.1.0", "x/lockstep-operator@sha256:"])
def test_an_image_without_a_digest_is_refused_in_a_sentence(tmp_path: Path, image: str) -> None:
    with pytest.raises(
        Failed, match=r"^the operator's image .+ has no digest: a release names REGISTRY/lockstep-operator:VERSION@sha256:…$"
    ):
        installyaml.write(tmp_path, Images(image, ""))
