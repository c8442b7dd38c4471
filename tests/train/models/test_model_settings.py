"""What is decided of a model's settings without any rank."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep_spec.choices import Quantization
from lockstep_spec.shape import Weight, shape_of
from lockstep_spec.training import LoraConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.engine.experts import LayerUsage, chosen_experts, layer_number, usage_fields
from lockstep_train.model.quantize import check_blocks, loading_options
from lockstep_train.model.trained import (
    adapter_names,
    add_lora,
    check_targets,
    description_differences,
    tensor_differences,
    unmatched_targets,
    whole_modules,
)

MINE: dict[str, Any] = {
    "r": 8,
    "target_modules": ["q_proj", "v_proj"],
    "modules_to_save": None,
    "use_rslora": False,
    "base_model_name_or_path": "/models/Base-8B",
}


def test_a_target_is_a_whole_part_of_a_dotted_name() -> None:
    names = ["model.layers.0.self_attn.q_proj", "lm_head"]
    assert unmatched_targets(["q_proj", "self_attn.q_proj", "lm_head"], names) == []
    assert unmatched_targets(["proj", "head", "layers"], names) == ["proj", "head", "layers"]


def layers(**names: torch.nn.Module) -> torch.nn.Module:
    """A model of one block that has these layers, and a `norm` after it."""
    block = torch.nn.ModuleDict(names)
    return torch.nn.ModuleDict(
        {"model": torch.nn.ModuleDict({"block": block, "norm": torch.nn.LayerNorm(4)}), "lm_head": torch.nn.Linear(4, 8)}
    )


@pytest.mark.parametrize(
    ("wanted", "trained"),
    [
        (("norm",), {"model.norm"}),
        (("gate",), {"model.block.gate"}),
        (("block.gate", "lm_head"), {"model.block.gate", "lm_head"}),
        (("norm", "q_norm"), {"model.norm", "model.block.q_norm"}),
    ],
    ids=["norm", "gate", "a part of two names and the head", "two norms"],
)
def test_layers_trained_whole_are_those_named_and_no_others(wanted: tuple[str, ...], trained: set[str]) -> None:
    """peft itself takes all whose names end so: `q_norm` for `norm`, `shared_gate` for `gate`."""
    model = layers(
        q_proj=torch.nn.Linear(4, 4), q_norm=torch.nn.LayerNorm(4), gate=torch.nn.Linear(4, 2), shared_gate=torch.nn.Linear(4, 1)
    ).requires_grad_(False)
    model.prepare_inputs_for_generation = None  # type: ignore[assignment]  # peft asks for it
    wrapped = add_lora(model, LoraConfig(rank=2, alpha=2, dropout=0.0, target_modules=("q_proj",), modules_to_save=wanted), seed=0)
    names = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad and ".modules_to_save." in name}
    assert {name.split(".modules_to_save.")[0].removeprefix("base_model.model.") for name in names} == trained
    assert sorted(adapter_names(wrapped).keys() - {name for name in adapter_names(wrapped) if "lora_" in name}) == sorted(names)


def test_an_adapter_s_settings_name_layers_as_the_run_does_where_no_other_name_ends_so() -> None:
    model = layers(gate=torch.nn.Linear(4, 2), shared_gate=torch.nn.Linear(4, 1))
    assert whole_modules(model, ("lm_head", "gate")) == ["lm_head", "model.block.gate"]


def test_a_layer_with_an_adapter_is_not_trained_whole_under_another_name_either() -> None:
    config = LoraConfig(rank=2, alpha=2, dropout=0.0, target_modules=("gate",), modules_to_save=("block.gate",))
    with pytest.raises(ConfigError, match=r"gate is in both targetModules and modulesToSave"):
        check_targets(layers(gate=torch.nn.Linear(4, 2)), config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"target_modules": ["v_proj", "q_proj"], "modules_to_save": []}, []),
        ({"target_modules": ".*_proj"}, []),
        ({"base_model_name_or_path": "org/Base-8B"}, []),
        ({"base_model_name_or_path": None}, []),
        ({"r": 16}, ["its rank is 16, not 8"]),
        ({"use_rslora": True}, ["its rankStabilized is true, not false"]),
        ({"modules_to_save": ["lm_head"]}, ["its modulesToSave is lm_head, not null"]),
        ({"target_modules": ["q_proj"]}, ["its targetModules is q_proj, not q_proj, v_proj"]),
        ({"base_model_name_or_path": "Other"}, ["its base model is Other, not Base-8B (base_model_name_or_path in adapter_config.json)"]),
    ],
)
def test_an_adapters_differences_are_told_in_the_words_of_the_job_file(change: dict[str, Any], said: list[str]) -> None:
    assert description_differences(MINE | change, MINE) == said


def test_of_the_tensors_the_first_difference_is_told() -> None:
    mine = {"a": (2, 3), "b": (4,)}
    assert tensor_differences(mine, mine) == []
    assert tensor_differences({"a": (2, 3)}, mine) == ["it has no tensor b"]
    assert tensor_differences(mine | {"c": (1,)}, mine) == ["its tensor c belongs to no trained layer"]
    assert tensor_differences(mine | {"a": (3, 2)}, mine) == ["its tensor a has the shape [3, 2], not [2, 3]"]


def test_an_even_load_has_entropy_one_and_a_single_expert_has_none() -> None:
    assert LayerUsage(3, (5, 5, 5, 5)).entropy == pytest.approx(1)
    assert LayerUsage(3, (20, 0, 0, 0)).entropy == 0
    assert LayerUsage(3, (0, 0)).shares == (0.0, 0.0)
    fields = usage_fields([LayerUsage(3, (3, 1))])
    assert fields["share"] == {"3": [0.75, 0.25]}
    assert fields["maxShare"] == {"3": 0.75}
    assert fields["entropy"] == {"3": pytest.approx(0.811278)}


def test_a_routers_choice_is_its_only_output_of_whole_numbers() -> None:
    chosen = torch.tensor([[1, 0]])
    assert chosen_experts((torch.zeros(1, 2), torch.zeros(1, 2), chosen)) is chosen
    assert layer_number("base_model.model.model.layers.12.mlp.gate") == 12


@pytest.mark.parametrize(
    ("quantization", "device", "inputs", "refused"),
    [
        (Quantization.NF4, "cpu", 96, True),
        (Quantization.NF4, "cpu", 36, True),
        (Quantization.NF4, "cpu", 128, False),
        (Quantization.NF4, "cuda", 96, False),
        (Quantization.NONE, "cpu", 96, False),
    ],
)
def test_nf4_on_a_cpu_needs_rows_of_whole_blocks(quantization: Quantization, device: str, inputs: int, refused: bool) -> None:
    weights = (
        Weight("embed.weight", (10, 96)),
        Weight("up_proj.weight", (7, inputs), linear=True),
        Weight("lm_head.weight", (10, 96), linear=True),
    )
    shape = shape_of(SimpleNamespace(), weights)
    with pytest.raises(ConfigError, match=f"up_proj of this model has {inputs} inputs") if refused else contextlib.nullcontext():
        check_blocks(shape, quantization, torch.device(device))


def test_nf4_asks_bitsandbytes_for_its_format() -> None:
    assert loading_options(Quantization.NONE, torch.bfloat16) == {}
    four = loading_options(Quantization.NF4, torch.bfloat16)["quantization_config"]
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_compute_dtype) == (True, "nf4", torch.bfloat16)
