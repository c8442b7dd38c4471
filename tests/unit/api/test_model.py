"""What the models share."""

from __future__ import annotations

from contextlib import nullcontext
from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.api.job import TrainingJob
from lockstep.api.quantity import amount, number
from lockstep.api.training import Training


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def training(deepspeed: Any) -> Training:
    return Training.model_validate({"model": {"name": "/m"}, "data": {"path": "/d"}, "deepspeed": deepspeed})


@pytest.mark.parametrize("settings", [None, {}, nested(32), {"z": "x" * (65536 - len('{"z": ""}'))}, {"z": [[1.5, None, True]]}])
def test_free_form_settings_within_their_bounds_are_taken_as_they_are(settings: Any) -> None:
    data = {"path": "/d", "chatTemplateKwargs": settings}
    assert Training.model_validate({"model": {"name": "/m"}, "data": data}).data.chat_template_kwargs == settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (nested(33), "nested deeper than 32 levels"),
        (nested(900), "nested deeper than 32 levels"),
        ({"a": [[[]] * 10]} | nested(40), "nested deeper than 32 levels"),
        ({"z": "x" * 65536}, "has 65545 bytes as JSON, but at most 65536 are allowed"),
        ({"z": "\U0001f980" * 16384}, "at most 65536"),
        ({"z": [{}] * 300_000}, "at most 65536"),
    ],
    ids=["33", "900", "lists", "bytes", "characters", "dense"],
)
def test_raw_deepspeed_settings_that_the_api_server_can_t_bound_are_refused_with_the_number(settings: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        training(settings)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (nested(33), "nested deeper than 32 levels"),
        ({"tools": [], "enable_thinking": True, "messages": 1}, "may not hold messages, tools: Lockstep sets that itself for every chat"),
    ],
)
def test_variables_of_a_chat_template_are_bounded_and_none_of_those_that_lockstep_sets(variables: Any, says: str) -> None:
    data = {"path": "/d", "chatTemplate": "/t.jinja", "chatTemplateKwargs": {"enable_thinking": False, "list": [1, None]}}
    assert (
        Training.model_validate({"model": {"name": "/m"}, "data": data}).to_dict()["data"]["chatTemplateKwargs"]
        == data["chatTemplateKwargs"]
    )
    with pytest.raises(ValidationError, match=says):
        Training.model_validate({"model": {"name": "/m"}, "data": {**data, "chatTemplateKwargs": variables}})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "1"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        ("1n", "0.000000001"),
        ("1e3", "1000"),
        ("1k", "1000"),
        ("1M", "1000000"),
        ("1Ki", "1024"),
        ("1Gi", "1073741824"),
        ("2Ti", "2199023255552"),
        ("8Ei", "9223372036854775807"),  # the API server keeps no more
        ("1e999999999", "9223372036854775807"),
    ],
)
def test_a_quantity_is_the_number_that_kubernetes_takes_it_for(text: str, value: str) -> None:
    assert number(text) == amount(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "1Zi", "Gi", "a lot", None])
def test_what_is_no_quantity_is_no_amount_and_counts_for_nothing(text: object) -> None:
    assert amount(text) is None
    assert number(text) == 0


@pytest.mark.parametrize(("characters", "is_refused"), [(52, False), (53, True)])
def test_a_job_s_name_leaves_room_for_what_kubernetes_adds(characters: int, is_refused: bool) -> None:
    job = {
        "apiVersion": "lockstep.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "a" * characters},
        "spec": {"script": {"path": "x.py"}},
    }
    with pytest.raises(ValidationError, match="52") if is_refused else nullcontext():
        TrainingJob.model_validate(job)


@pytest.mark.parametrize(("number", "is_refused"), [(10**15, False), (10**15 + 1, True), (1.1e15, True)])
def test_a_number_is_at_most_ten_to_the_fifteenth(number: float, is_refused: bool) -> None:
    stated = {"model": {"name": "/m"}, "data": {"path": "/d"}, "optimization": {"learningRate": number}}
    with pytest.raises(ValidationError, match="is not valid: must be a number") if is_refused else nullcontext():
        Training.model_validate(stated)


def test_every_raw_setting_that_the_trainer_would_refuse_is_refused_at_once_and_auto_is_left_out() -> None:
    stated = {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 3}, "train_batch_size": "auto", "comms": 1}
    with pytest.raises(ValidationError) as refused:
        training(stated)
    for words in ("gradient_accumulation_steps contradicts", "zero_optimization.stage contradicts", "comms is not a DeepSpeed setting"):
        assert f"deepspeed.{words}" in str(refused.value)
    assert "train_batch_size contradicts" not in str(refused.value)
    automatic = {"train_batch_size": "auto", "optimizer": {"params": {"lr": "auto"}}, "fp16": {"enabled": "auto"}}
    assert training(automatic).deepspeed == automatic


def test_columns_are_of_lockstep_s_keys_also_of_each_source() -> None:
    columns = {"instruction": "question", "output": "answer", "images": ""}
    data = {"sources": [{"path": "/d", "columns": columns}, {"path": "/e"}]}
    assert Training.model_validate({"model": {"name": "/m"}, "data": data}).data.sources[0].columns == columns
    with pytest.raises(ValidationError, match=r"may not hold question but with .*: its keys are messages, conversations, prompt"):
        Training.model_validate({"model": {"name": "/m"}, "data": {"path": "/d", "columns": {"question": "instruction"}}})
