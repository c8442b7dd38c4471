"""The chart as it is generated: its objects are the manifests', and its values, schema and templates agree. Nothing is rendered by helm."""

from __future__ import annotations

import copy
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lockstep.api.errors import Failed
from lockstep.api.files.yamltext import load_all_yaml, load_yaml
from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.plan.cluster.scope import Scope, scoped
from lockstep.plan.ship.deploy import called
from release import chart, parts

IMAGES = parts.Images(*(f"registry.example.com/team/lockstep-{name}:1@sha256:{'a' * 64}" for name in ("operator", "trainer")))
FILES = dict(chart.files(IMAGES))
TABLE = {value.path: value for value in chart.values(IMAGES)}
TEMPLATES = {name: text for name, text in FILES.items() if name.startswith("templates/")}
HOLE = "filled by helm"


def read(name: str) -> dict[str, dict[str, Any]]:
    """Objects of a template that is made of manifests, those of every condition, with HOLE where a template stands."""
    lines = [line for line in FILES[f"templates/{name}"].splitlines() if not line.startswith("{{-")]
    text = re.sub(r'\{\{ "\{\{" \}\}', "\0", "\n".join([*lines, ""]))
    text = re.sub(r"(?m)(: |- )(.*\{\{ .*\}\}.*)$", rf"\1{HOLE}", text).replace("\0", "{{")
    return {called(item): item for item in load_all_yaml(text)}


def without_fields(deployment: dict[str, Any]) -> dict[str, Any]:
    """A Deployment without what values decide."""
    rest = copy.deepcopy(deployment)
    container = chart.at(rest, chart.CONTAINER)
    container["env"] = [variable for variable in container["env"] if variable != HOLE]
    for field in chart.FIELDS:
        above, _, key = field.path.rpartition("/")
        chart.at(rest, above).pop(key, None)
    return rest


def test_the_operator_s_template_has_each_object_of_the_kustomization_as_it_is_there() -> None:
    whole = {called(item): item for item in parts.operator_objects()}
    made = read("roles.yaml") | read("operator.yaml")
    assert whole.keys() - made.keys() == {f"Namespace {OPERATOR_NAMESPACE}"}  # --create-namespace makes it
    for name in whole.keys() & made.keys():
        assert (without_fields(made[name]) if "Deployment" in name else made[name]) == (
            without_fields(whole[name]) if "Deployment" in name else whole[name]
        )


def test_named_namespaces_get_what_deploy_gives_them_there_and_nothing_more() -> None:
    whole = parts.operator_objects()
    named = {called(item): item for item in scoped(copy.deepcopy(whole), Scope((HOLE,)))}
    more = {name: item for name, item in read("operator.yaml").items() if name not in {called(item) for item in whole}}
    assert more == {name: item for name, item in named.items() if name not in {called(item) for item in whole}} != {}
    text = FILES["templates/operator.yaml"]
    assert '{"name": "LOCKSTEP_NAMESPACES", "value": {{ join "," .Values.namespaces | toJson }}}' in text
    (taken,) = {called(item) for item in whole} - named.keys()
    assert f"{{{{- if not .Values.namespaces }}}}\n---\napiVersion: rbac.authorization.k8s.io/v1\nkind: {taken.split()[0]}" in text


def test_the_other_templates_have_the_objects_of_openshift_and_of_monitoring_as_they_are() -> None:
    base = {called(item) for item in parts.operator_objects()}
    assert list(read("openshift.yaml").values()) == [item for item in parts.operator_objects("openshift") if called(item) not in base]
    assert list(read("monitoring.yaml").values()) == parts.monitoring_objects()


def test_the_chart_has_every_crd() -> None:
    assert [json.loads(text) for name, text in FILES.items() if name.startswith("definitions/")] == parts.crds()


@pytest.mark.parametrize("field", chart.FIELDS, ids=lambda field: field.path)
def test_each_field_that_a_value_fills_is_in_the_manifest_or_only_there_if_the_value_is_given(field: chart.Field) -> None:
    deployment = next(item for item in parts.operator_objects() if item["kind"] == "Deployment")
    above, _, key = field.path.rpartition("/")
    parent = chart.at(deployment, above)
    assert (key in parent) is not bool(field.given)


def test_templates_read_all_values_and_no_others() -> None:
    read_values = {path for text in TEMPLATES.values() for path in re.findall(r"\.Values\.([\w.]+)", text)}
    assert read_values == TABLE.keys()


def test_values_yaml_has_the_defaults_with_a_comment_each_and_fits_the_schema() -> None:
    stated = load_yaml(FILES["values.yaml"])
    jsonschema.validate(stated, load_yaml(FILES["values.schema.json"]))
    for path, value in TABLE.items():
        assert chart.at(stated, path.replace(".", "/")) == value.default
        assert f"# {value.comment}\n" in FILES["values.yaml"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("replicas", "two", "'two' is not of type 'integer'"),
        ("replicas", 0, "0 is less than the minimum of 1"),
        ("resources", {"limit": {}}, "'limit' was unexpected"),
        ("namespaces", ["Team"], "'Team' does not match"),
        ("platform", "okd", "'okd' is not one of ['kubernetes', 'openshift']"),
        ("replica", 2, "'replica' was unexpected"),
        ("image", {"name": "x"}, "'name' was unexpected"),
    ],
)
def test_a_wrong_value_or_an_unknown_key_is_named(path: str, value: object, words: str) -> None:
    with pytest.raises(jsonschema.ValidationError) as raised:
        jsonschema.validate(load_yaml(FILES["values.yaml"]) | {path: value}, load_yaml(FILES["values.schema.json"]))
    assert words in raised.value.message


def test_the_defaults_name_the_image_by_the_digest_that_was_given() -> None:
    image = load_yaml(FILES["values.yaml"])["image"]
    assert image == {"repository": "registry.example.com/team/lockstep-operator", "tag": parts.version(), "digest": f"sha256:{'a' * 64}"}


def test_an_image_without_a_digest_makes_no_chart(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"^chart: the operator's image reg/lockstep-operator:1 has no digest: it is REGISTRY/[^\n]+$"):
        chart.write(tmp_path, parts.Images("reg/lockstep-operator:1", IMAGES.trainer))
    assert not any(tmp_path.iterdir())


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    [one], [two] = (chart.write(tmp_path / name, IMAGES) for name in ("one", "two"))
    assert one.name == f"lockstep-{parts.version()}.tgz" and one.read_bytes() == two.read_bytes()
    with tarfile.open(one) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(f"lockstep/{name}" for name in FILES)
    assert {(member.mtime, member.uid, member.mode) for member in members} == {(0, 0, 0o644)}
