"""What all forms of a release are made from: the version, the images by their digests, and the operator's objects."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.api.errors import Failed
from lockstep.api.files.yamltext import dump_all_yaml
from lockstep.api.objects import Object
from lockstep.platforms.clusters.install import definitions, kustomized
from setup import ROOT

DIST = ROOT / "dist"
PLACEHOLDER = "lockstep-operator"
DIGEST = "sha256:[0-9a-f]{64}"
BY_DIGEST = re.compile(rf"[^@\s]+@{DIGEST}")
OLDEST_KUBERNETES = "1.30.0"
"""The first with ValidatingAdmissionPolicy, which bounds the operator's account."""


@dataclass(frozen=True)
class Images:
    """References by digest: `registry/name@sha256:…`."""

    operator: str
    trainer: str


def version() -> str:
    """The version in pyproject.toml, the only place that has it."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def crds() -> list[Object]:
    return definitions(ROOT / "manifests")


def operator_objects(platform: str = "kubernetes") -> list[Object]:
    """The operator of the kustomization for `kubernetes` or `openshift`, without CRDs, with the image's placeholder `lockstep-operator`."""
    return kustomized(ROOT / "manifests/operator/overlays" / platform)


def with_image(objects: Sequence[Object], image: str) -> list[Object]:
    """Put the operator's image, which is named by its digest, in place of the placeholder. Raises Failed."""
    if not BY_DIGEST.fullmatch(image):
        raise Failed(f"the operator's image {image or '(none)'} has no digest: a release names REGISTRY/lockstep-operator:VERSION@sha256:…")
    for container in (c for o in objects if o["kind"] == "Deployment" for c in o["spec"]["template"]["spec"]["containers"]):
        container["image"] = image
        container["env"] = [{**v, "value": image} if v.get("value") == PLACEHOLDER else v for v in container["env"]]
    return [*objects]


def write_yaml(path: Path, objects: Sequence[Object], comment: str = "") -> Path:
    """Write objects as one file, in their order; the same objects give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    path.write_text(lines + dump_all_yaml(objects), encoding="utf-8")
    return path


def monitoring_objects() -> list[Object]:
    return kustomized(ROOT / "manifests/monitoring")
