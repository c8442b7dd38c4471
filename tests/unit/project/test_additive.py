"""A CRD may grow and become looser. What upgrades would lose or refuse is named with its path: one change each, made to the real CRDs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from additive import LOOSER, RECORDED, differences, losses
from lockstep.api.crd import training_job_crd
from support.checkout import ROOT

Schema = dict[str, Any]
CRD = training_job_crd()
FILE = "lockstep.dev_trainingjobs.yaml"


def at(crd: Schema, path: str) -> Schema:
    """The schema of a field; `[]`: of a list's items, `{}`: of a map's values."""
    schema: Schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for step in path.replace("[]", ".items").replace("{}", ".additionalProperties").split(".")[1:]:
        schema = schema[step] if step in ("items", "additionalProperties") else schema["properties"][step]
    return schema


def sets(**keys: Any) -> Callable[[Schema], object]:
    return lambda schema: schema.update(keys)


def drops(*keys: str) -> Callable[[Schema], object]:
    return lambda schema: [schema.pop(key) for key in keys]


def fields(change: Callable[[Schema], object]) -> Callable[[Schema], object]:
    return lambda schema: change(schema["properties"])


MODEL, ENV, LORA = ".spec.training.model", ".spec.env", ".spec.training.lora"
TIGHTER: list[tuple[str, Callable[[Schema], object], str]] = [
    (".spec", fields(drops("cluster")), ".spec.cluster: field goes"),
    (".status", fields(drops("goodput")), ".status.goodput: field goes"),
    (".spec.nodes", sets(type="string"), ".spec.nodes: type integer became string"),
    (".spec.nodes", sets(maximum=1023), ".spec.nodes: maximum 1024 became 1023"),
    (".spec.nodes", sets(minimum=2), ".spec.nodes: minimum 1 became 2"),
    (".spec.cluster", sets(maxLength=63), ".spec.cluster: maxLength 253 became 63"),
    (".spec.cluster", sets(pattern="^[a-z]+$"), "became ^[a-z]+$"),
    (".spec.preflight", lambda schema: schema["enum"].remove("Full"), ".spec.preflight: value Full goes"),
    (".spec.preflight", lambda schema: schema.pop("enum") and schema.update(maxLength=4), ".spec.preflight: maxLength 5 became 4"),
    (".spec.cluster", sets(enum=["a"]), ".spec.cluster: value of any other kind goes"),
    (".spec.startTimeoutSeconds", sets(default=60), "default 1800 became 60"),
    (".spec.startTimeoutSeconds", drops("default"), "default 1800 became unset"),
    (".spec.restart", lambda schema: schema["default"].update(retry=1), ".spec.restart: default 0 became 1"),
    (".spec", sets(required=["cluster"]), ".spec: cluster is required now"),
    (".spec", lambda schema: schema["x-kubernetes-validations"].append({"rule": "self.nodes > 1"}), ".spec: rule self.nodes > 1 is new"),
    (ENV, drops("x-kubernetes-list-type"), "x-kubernetes-list-type map became unset"),
    (ENV, lambda schema: schema.update({"x-kubernetes-list-map-keys": ["value"]}), "['name'] became ['value']"),
    (f"{ENV}[]", fields(drops("valueFrom")), ".spec.env[].valueFrom: field goes"),
    (".spec.podTemplate.labels", drops("additionalProperties"), ".spec.podTemplate.labels{}: additionalProperties goes"),
    (".spec.training.deepspeed", drops("x-kubernetes-preserve-unknown-fields"), "preserve-unknown-fields True became unset"),
    (".spec.training.deepspeed", sets(properties={"a": {"type": "string"}}), ".deepspeed.a: field is new where any value was taken"),
    (LORA, lambda schema: schema["anyOf"].pop(), "anyOf"),
    (LORA, fields(lambda all_: all_.update(colour={"default": "Red"})), f"{LORA}.colour: field is new and has a default"),
]
LOOSER_CHANGES: list[tuple[str, Callable[[Schema], object]]] = [
    (".spec", fields(lambda all_: all_.update(colour={"type": "string", "enum": ["Red"]}))),
    (".status", fields(lambda all_: all_.update(colour={"type": "string", "default": "Red"}))),
    (".spec.nodes", sets(maximum=4096)),
    (".spec.nodes", drops("maximum", "minimum")),
    (".spec.cluster", drops("pattern", "maxLength")),
    (".spec.preflight", lambda schema: schema["enum"].append("Long")),
    (".spec.preflight", lambda schema: schema.pop("enum") and schema.update(maxLength=64)),
    (".spec.restart", lambda schema: schema["default"].update(wait=1)),
    (".spec", drops("x-kubernetes-validations")),
    (".spec.cluster", sets(description="Deprecated: use place.")),
    (MODEL, drops("required")),
    (".spec.restart", lambda schema: schema.update({"x-kubernetes-preserve-unknown-fields": True})),
    (LORA, drops("anyOf")),
]


def changed(path: str, change: Callable[[Schema], object]) -> list[str]:
    new = copy.deepcopy(CRD)
    change(at(new, path))
    return list(losses(CRD, new))


@pytest.mark.parametrize(("path", "change", "words"), TIGHTER, ids=[row[2] for row in TIGHTER])
def test_what_goes_changes_or_tightens_is_named_with_its_path(path: str, change: Callable[[Schema], object], words: str) -> None:
    (line,) = changed(path, change)
    assert line.startswith("trainingjobs.lockstep.dev v1alpha1 .") and words in line


@pytest.mark.parametrize(("path", "change"), LOOSER_CHANGES)
def test_what_comes_or_becomes_looser_passes(path: str, change: Callable[[Schema], object]) -> None:
    assert changed(path, change) == []


def with_versions(*versions: Schema) -> Schema:
    return CRD | {"spec": CRD["spec"] | {"versions": list(versions)}}


def test_a_version_comes_beside_the_old_one_and_none_that_is_served_goes() -> None:
    old = CRD["spec"]["versions"][0]
    new = old | {"name": "v1beta1", "schema": {"openAPIV3Schema": {"type": "object"}}}
    assert list(losses(CRD, with_versions(old | {"storage": False}, new))) == []
    assert list(losses(CRD, with_versions(new))) == ["trainingjobs.lockstep.dev v1alpha1: is not served any more"]
    assert list(losses(CRD, with_versions(old | {"served": False}, new))) == ["trainingjobs.lockstep.dev v1alpha1: is not served any more"]
    assert list(losses(with_versions(old | {"served": False}, new), with_versions(new))) == []
    assert list(losses(CRD, with_versions(old | {"subresources": {"status": {}}}))) == [
        "trainingjobs.lockstep.dev v1alpha1: subresource scale goes"
    ]
    assert "trainingjobs.lockstep.dev: its group, scope or names changed, or it goes" in list(losses(CRD, {}))


def test_the_crds_are_those_of_the_last_landing_and_more() -> None:
    assert differences() == []


def test_a_looser_change_passes_by_its_line_and_a_line_of_no_change_is_refused(tmp_path: Path) -> None:
    for path in RECORDED.glob("lockstep*"):
        (tmp_path / path.name).write_text(path.read_text())
    change = "trainingjobs.lockstep.dev v1alpha1 .spec.cluster: maxLength 300 became 253"
    before = yaml.safe_load((tmp_path / FILE).read_text())
    at(before, ".spec.cluster")["maxLength"] = 300
    (tmp_path / FILE).write_text(yaml.safe_dump(before))
    named = yaml.safe_load((RECORDED / LOOSER).read_text()) if (RECORDED / LOOSER).exists() else {}
    crds = ROOT / "manifests/crds"
    (tmp_path / LOOSER).write_text(yaml.safe_dump(named))
    assert differences(crds, tmp_path) == [change]
    (tmp_path / LOOSER).write_text(yaml.safe_dump(named | {change: "a reason"}))
    assert differences(crds, tmp_path) == []
    (tmp_path / LOOSER).write_text(yaml.safe_dump(named | {change: "a reason", "a line": "a reason"}))
    assert differences(crds, tmp_path) == [f"{LOOSER}: no change is: a line"]
