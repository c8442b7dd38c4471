"""What decays and what doesn't, beside the Trainer of transformers; Adam's own settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Trainer

from lockstep_spec.choices import Offload
from lockstep_spec.training import OptimizationConfig
from lockstep_train.engine.optimizer import decay_groups, torch_optimizer

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
OPTIMIZATION = OptimizationConfig(epochs=1, learning_rate=1e-3, micro_batch_size=1, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-6)
MODELS = {
    "norms": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "biases of experts, which are a matrix": lambda: GptOssForCausalLM(
        GptOssConfig(**SMALL, num_local_experts=2, head_dim=8, layer_types=["full_attention"])
    ),
}


@pytest.mark.parametrize("model", list(MODELS))
def test_the_weights_that_decay_are_those_of_transformers_trainer(model: str) -> None:
    made = MODELS[model]()
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    decaying, others = ({names[id(each)] for each in group["params"]} for group in decay_groups(made.named_parameters(), 0.1))
    # A vector of gpt-oss that isn't named after what it is: one number a head, for attention to go nowhere.
    sinks = {name for name in others if name.endswith("sinks")}
    theirs = set(Trainer.get_decay_parameter_names(None, made))  # type: ignore[arg-type]
    assert decaying == theirs - sinks
    assert others == set(names.values()) - decaying
    assert any(name.endswith("norm.weight") for name in others)


def test_no_group_is_empty_and_without_decay_there_is_one() -> None:
    matrix, vector = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,)))
    named = [("a.weight", matrix), ("b.weight", vector)]
    assert [group["weight_decay"] for group in decay_groups(named, 0.1)] == [0.1, 0.0]
    assert [group["params"] for group in decay_groups(named[:1], 0.1)] == [[matrix]]
    assert [group["params"] for group in decay_groups(named, 0.0)] == [[matrix, vector]]


def test_a_weight_that_stage3_has_cut_counts_with_its_whole_shape() -> None:
    cut: Any = torch.nn.Parameter(torch.zeros(0))
    cut.ds_shape = (4, 4)
    assert decay_groups([("a.weight", cut)], 0.1)[0]["weight_decay"] == 0.1


def test_adams_settings_reach_torch() -> None:
    made = torch_optimizer([("a.weight", torch.nn.Parameter(torch.zeros(2, 2)))], OPTIMIZATION)
    [group] = made.param_groups
    assert (group["betas"], group["eps"], group["lr"], group["weight_decay"]) == ((0.8, 0.95), 1e-6, 1e-3, 0.1)
    assert isinstance(made, torch.optim.AdamW)
    assert torch_optimizer([("a", torch.nn.Parameter(torch.zeros(2)))], replace(OPTIMIZATION, offload=Offload.CPU)).param_groups[0]["fused"]
