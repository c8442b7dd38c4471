"""What is deprecated goes on working: CRD and pages say what to use instead; verbs and the operator warn people who use it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import pytest
from pydantic import Field

from golden.plan_cases import job, profile
from lockstep.api.job import TrainingJobSpec
from lockstep.api.model import Model, deprecated, deprecations
from lockstep.api.schema import structural_schema
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.render.resolve import resolve
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, condition, fresh


class Color(StrEnum):
    RED = "Red"
    ROT = "Rot"


class Part(Model):
    size: Annotated[int | None, Field(json_schema_extra=deprecated("use weight"))] = None
    """Size of the part."""
    color: Annotated[Color, Field(json_schema_extra=deprecated("use Red", "Rot"))] = Color.RED
    """Color of the part."""


class Whole(Model):
    part: Part = Part()
    """The first part."""
    parts: Annotated[list[Part] | None, Field(json_schema_extra=deprecated("use part"))] = None
    """Other parts."""


def test_the_description_of_a_field_ends_with_what_to_use_instead() -> None:
    part = structural_schema(Part)["properties"]
    assert part["size"]["description"] == "Size of the part. Deprecated: use weight."
    assert part["color"]["description"] == "Color of the part. Deprecated (Rot): use Red."
    assert part["color"]["enum"] == ["Red", "Rot"] and "x-lockstep-deprecated" not in str(part)
    assert "description" not in structural_schema(Part, described=False)["properties"]["size"]


@pytest.mark.parametrize(
    ("whole", "sentences"),
    [
        ({}, []),
        ({"part": {"color": "Red", "size": None}, "parts": None}, []),
        ({"part": {"color": "Rot"}}, ["x.part.color: Rot is deprecated: use Red"]),
        ({"part": {"size": 1}}, ["x.part.size is deprecated: use weight"]),
        ({"parts": [{}, {"size": 2}]}, ["x.parts is deprecated: use part", "x.parts.size is deprecated: use weight"]),
    ],
)
def test_what_is_used_is_named_and_what_the_defaults_have_is_not(whole: dict[str, object], sentences: list[str]) -> None:
    assert list(deprecations(Whole.model_validate(whole), "x")) == sentences


def test_verbs_and_condition_accepted_warn_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingJobSpec.model_fields["queue_name"], "json_schema_extra", deprecated("use a label"))
    sentence = "spec.queueName is deprecated: use a label"
    warnings = resolve(job(queueName="team"), profile()).warnings
    assert [(one.reason, one.message) for one in warnings] == [("Deprecated", sentence)]
    status, _, message = condition(reconcile(fresh(queueName="team"), None, CONTEXT, NOW), "Accepted")
    assert (status, message) == ("True", f"the job fits its cluster; {sentence}")
