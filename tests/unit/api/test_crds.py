"""The CRDs in manifests/ are those of the models, structural, and bounded everywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.crd import training_cluster_crd, training_job_crd
from lockstep.api.files.patterns import PATTERN_WORDS
from support.checkout import ROOT

CRDS = {"TrainingJob": training_job_crd(), "TrainingCluster": training_cluster_crd()}
BOTH = pytest.mark.parametrize("kind", CRDS)


def version(kind: str) -> dict[str, Any]:
    return CRDS[kind]["spec"]["versions"][0]


def schemas(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of every field of a kind."""
    waiting = [("", version(kind)["schema"]["openAPIV3Schema"])]
    while waiting:
        path, schema = waiting.pop()
        yield path, schema
        waiting += [(f"{path}.{name}", inner) for name, inner in schema.get("properties", {}).items()]
        waiting += [(path + key, schema[key]) for key in ("items", "additionalProperties") if key in schema]


def ours(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same without what is Kubernetes' own."""
    return ((path, schema) for path, schema in schemas(kind) if path.startswith((".spec", ".status")))


def test_the_check_fails_and_shows_the_difference_when_a_file_has_drifted(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    command = [sys.executable, "scripts/generate.py", "crds"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    drifted = tmp_path / "manifests/crds/lockstep.dev_trainingjobs.yaml"
    drifted.write_text(drifted.read_text().replace("maxItems: 16", "maxItems: 17", 1))
    done = subprocess.run([*command, "--check"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "maxItems: 17\n" in done.stderr and "run `make manifests`" in done.stderr
    assert "maxItems: 17\n" in drifted.read_text()


@BOTH
def test_the_file_is_read_back_as_it_was_made(kind: str) -> None:
    name = CRDS[kind]["metadata"]["name"].split(".")[0]
    assert yaml.safe_load((ROOT / f"manifests/crds/lockstep.dev_{name}.yaml").read_text()) == CRDS[kind]


def is_number_or_text(schema: dict[str, Any]) -> bool:
    """CRDs know no type that is both: the schema has none, and leaves out what is neither."""
    neither = {"x-kubernetes-preserve-unknown-fields", "maxItems", "maxProperties", "not"}
    return "type" not in schema and neither | {"pattern", "maxLength", "minimum", "maximum"} <= schema.keys()


@BOTH
def test_every_schema_has_a_type_and_nothing_that_a_crd_may_not_hold(kind: str) -> None:
    forbidden = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "const", "title", "patternProperties", "nullable"}
    typed = [(path, schema) for path, schema in schemas(kind) if not is_number_or_text(schema)]
    # Lora's anyOf says what CEL can't say of a dropout that is a number or text.
    wrong = [path for path, schema in typed if "type" not in schema or forbidden & schema.keys()]
    assert sorted(wrong) == ([".spec.training.lora"] if kind == "TrainingJob" else [])
    assert [path for path, schema in schemas(kind) if "properties" in schema and "additionalProperties" in schema] == []


@BOTH
def test_every_text_list_and_map_is_bounded(kind: str) -> None:
    bounds = {"string": {"maxLength", "enum"}, "array": {"maxItems"}, "object": {"properties", "maxProperties"}}
    assert [path for path, schema in ours(kind) if schema.get("type") in bounds and not bounds[schema["type"]] & schema.keys()] == []


@BOTH
def test_every_number_of_a_spec_is_bounded_below(kind: str) -> None:
    assert [
        path for path, schema in schemas(kind) if path.startswith(".spec") and schema.get("type") == "integer" and "minimum" not in schema
    ] == []


@BOTH
def test_every_field_has_a_description(kind: str) -> None:
    fields = [(path, schema) for path, schema in ours(kind) if not path.endswith(("items", "additionalProperties"))]
    assert [path for path, schema in fields if not schema.get("description", "").endswith((".", ".)", "…"))] == []


@BOTH
def test_every_pattern_has_words(kind: str) -> None:
    assert [path for path, schema in schemas(kind) if "pattern" in schema and schema["pattern"] not in PATTERN_WORDS] == []


@BOTH
def test_an_object_with_defaults_inside_has_them_as_its_own_default_unless_it_is_optional(kind: str) -> None:
    for _, schema in ours(kind):
        if schema.get("type") == "object" and "default" in schema:
            inner = {name: field["default"] for name, field in schema["properties"].items() if "default" in field}
            assert schema["default"] == inner


def test_what_is_optional_as_a_whole_has_no_default() -> None:
    spec = version("TrainingJob")["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert [name for name, field in spec.items() if "default" in field] == [
        "type",
        "fabric",
        "restart",
        "startTimeoutSeconds",
        "preflight",
        "suspend",
    ]
    assert "default" not in spec["training"]["properties"]["evaluation"]


def test_lists_of_named_things_are_maps_for_merging() -> None:
    keys = {
        path: schema["x-kubernetes-list-map-keys"] for kind in CRDS for path, schema in ours(kind) if "x-kubernetes-list-map-keys" in schema
    }
    assert keys == {
        ".spec.env": ["name"],
        ".spec.podTemplate.volumes": ["name"],
        ".status.conditions": ["type"],
        ".spec.nccl.env": ["name"],
        ".spec.pod.env": ["name"],
        ".spec.pod.volumes": ["name"],
    }


def test_the_columns_of_a_job_are_those_that_were_promised() -> None:
    columns = version("TrainingJob")["additionalPrinterColumns"]
    assert [c["name"] for c in columns if "priority" not in c] == ["Ready", "Step", "Progress", "Restarts", "Reason", "Age"]
    assert [c["name"] for c in columns if c.get("priority") == 1] == ["Cluster", "Fabric", "Checkpoint"]


def test_names_and_scopes() -> None:
    found = {kind: (crd["spec"]["scope"], crd["spec"]["names"]["shortNames"]) for kind, crd in CRDS.items()}
    assert found == {"TrainingJob": ("Namespaced", ["tj"]), "TrainingCluster": ("Cluster", ["tc"])}


def test_the_api_server_adds_nothing_to_a_status() -> None:
    """Else status would never be as the operator wants it, and be written at every look at the job."""
    status = training_job_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]

    def defaults(schema: object) -> list[object]:
        if isinstance(schema, dict):
            own = [schema] if "default" in schema and "type" in schema else []
            return own + [found for value in schema.values() for found in defaults(value)]
        return [found for item in schema for found in defaults(item)] if isinstance(schema, list) else []

    assert defaults(status) == []
