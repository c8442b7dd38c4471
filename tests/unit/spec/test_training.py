"""The settings that people write (lockstep.api) and those that the trainer reads (lockstep_spec.training) are the same."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, fields
from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.api import training
from lockstep.api.model import Model
from lockstep.api.training import Training
from lockstep.plan.render.run import trainer_config
from lockstep_spec.training import OptimizationConfig

EVERYTHING = Training.model_validate(
    {
        "model": {"name": "/models/a"},
        "data": {"sources": [{"path": "/d.jsonl"}]},
        "evaluation": {"data": {"path": "/e.jsonl"}},
    }
)
"""One of each section, with every default in it."""
ONLY_WRITTEN = {"token_secret"}
"""Read by the operator."""


def pairs(model: Model, config: Any) -> list[tuple[Model, Any]]:
    """Every section, as people write it and as the trainer reads it."""
    found = [(model, config)]
    for field in dataclasses.fields(config):
        written, read = getattr(model, field.name), getattr(config, field.name)
        if isinstance(written, Model):
            found += pairs(written, read)
        elif isinstance(read, tuple):
            found += [pair for one, other in zip(written, read, strict=True) if isinstance(one, Model) for pair in pairs(one, other)]
    return found


SECTIONS = pairs(EVERYTHING, trainer_config(EVERYTHING))


def test_every_section_is_compared() -> None:
    assert {type(config).__name__ for _, config in SECTIONS} == {
        "TrainingConfig", "ModelConfig", "LoraConfig", "DataConfig", "SourceConfig", "OptimizationConfig", "EvaluationConfig",
        "SamplesConfig", "CheckpointConfig",
    }  # fmt: skip


@pytest.mark.parametrize(("model", "config"), SECTIONS, ids=lambda value: type(value).__name__)
def test_a_setting_has_the_same_name_and_default_on_both_sides(model: Model, config: Any) -> None:
    fields = dataclasses.fields(config)
    assert set(type(model).model_fields) - ONLY_WRITTEN == {field.name for field in fields}
    usual = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    usual |= {field.name: field.default_factory() for field in fields if field.default_factory is not dataclasses.MISSING}
    stated = model.model_fields_set
    assert {name: getattr(config, name) for name in usual if name not in stated} == {
        name: usual[name] for name in usual if name not in stated
    }


@pytest.mark.parametrize("dropout", ["1", "1.5", 2])
def test_what_the_trainer_would_refuse_is_refused_when_it_is_written(dropout: object) -> None:
    with pytest.raises(ValidationError, match=r"lora\.dropout"):
        Training.model_validate({"model": {"name": "/m"}, "data": {"path": "/d"}, "lora": {"dropout": dropout}})


def test_what_a_job_does_not_state_is_what_the_trainer_takes() -> None:
    stated, read = training.Optimization(), OptimizationConfig(1, 2e-4, 1)
    for field in fields(read):
        if field.default is not MISSING and isinstance(field.default, int | float):
            assert float(getattr(stated, field.name)) == field.default, field.name
