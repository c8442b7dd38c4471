"""What the API server would prune from stored objects by another version's CRD."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.api.crd import training_cluster_crd, training_job_crd
from lockstep.plan.ship.deploy import SHOWN, loss_lines, lost_fields, shown_lines
from recorded.recorder import newest, recorded
from support.crd_rule_cases import CASES, job, training

SCHEMAS: dict[str, dict[str, Any]] = {
    crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for crd in (training_job_crd(), training_cluster_crd())
}
SCHEMA = SCHEMAS["TrainingJob"]


@pytest.mark.parametrize(
    ("item", "fields"),
    [
        (job() | {"metadata": {"name": "x", "labels": {"a": "b"}, "anything": {}}}, []),
        (job(clusterProfileName="mine"), ["spec.clusterProfileName"]),
        (job(cluster="mine", old={"a": {"b": 1}}), ["spec.old"]),
        (job() | {"status": {"profile": {"name": "a"}, "restarts": 1}, "more": 1}, ["status.profile", "more"]),
        (job(env=[{"name": "A"}, {"name": "B", "kind": 1}, {"name": "C", "kind": 2}]), ["spec.env[].kind"]),
        (job(podTemplate={"labels": {"any": "text"}, "annotation": {}}), ["spec.podTemplate.annotation"]),
        (training(deepspeed={"any": {"thing": [{"a": 1}]}}), []),
        (training(optimization={"learningRate": 1e-4, "rate": 1}), ["spec.training.optimization.rate"]),
        (job(nodes={"a": 1}), ["spec.nodes.a"]),
        (job(suspend=None, env=None), []),
    ],
)
def test_fields_that_the_schema_has_not_are_named_and_free_ones_stay(item: dict[str, Any], fields: list[str]) -> None:
    assert lost_fields(item, SCHEMA) == fields


def test_known_parts_of_what_takes_any_field_are_pruned_inside() -> None:
    fabric = {"type": "object", "properties": {"mode": {"type": "object", "properties": {}}}, "x-kubernetes-preserve-unknown-fields": True}
    assert lost_fields({"fabric": {"other": {"a": 1}, "mode": {"b": 1}}}, {"properties": {"fabric": fabric}}) == ["fabric.mode.b"]


def test_what_this_version_stores_loses_nothing() -> None:
    items = [case.accepted for case in CASES.values()]
    assert [lost_fields(item, SCHEMAS[item["kind"]]) for item in items] == [[]] * len(items)
    assert lost_fields({"status": newest(recorded())["status", "every field"]}, SCHEMA) == []


def test_twenty_objects_are_named_and_the_others_counted() -> None:
    items = [job(foo=1) | {"metadata": {"name": f"x{number}", "namespace": "ml"}, "status": {"bar": 1}} for number in range(SHOWN + 3)]
    lines = shown_lines(loss_lines([*items, job()], SCHEMA))
    assert lines == [f"TrainingJob ml/x{number} would lose spec.foo, status.bar" for number in range(20)] + ["and 3 more"]
    assert shown_lines(lines[:SHOWN]) == lines[:SHOWN]
