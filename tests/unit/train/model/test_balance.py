"""Routers that are trained get their model's own loss that balances experts, or a warning; frozen ones get neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)  # fmt: skip

from lockstep_spec.training import LoraConfig
from lockstep_train.engine.experts import find_balance, trained_routers
from lockstep_train.model.trained import add_lora

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which peft asks for

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8,
    "moe_intermediate_size": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def qwen(coefficient: float = 0.25) -> Any:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, num_experts=4, router_aux_loss_coef=coefficient))


def glm() -> Any:
    return Glm4MoeForCausalLM(
        Glm4MoeConfig(**SMALL, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
    )


def jetmoe() -> Any:
    return JetMoeForCausalLM(
        JetMoeConfig(
            **{name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
            num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2, aux_loss_coef=0.25,
        )
    )  # fmt: skip


def hunyuan() -> Any:
    return HunYuanMoEV1ForCausalLM(
        HunYuanMoEV1Config(**{name: SMALL[name] for name in SMALL if name != "num_experts_per_tok"}, num_experts=4, moe_topk=2)
    )


def adapted(model: Any, **changes: Any) -> Any:
    model.requires_grad_(False)
    return add_lora(model, LoraConfig(rank=2, alpha=4, dropout=0.0, target_modules=("q_proj",), **changes), seed=1)


@pytest.mark.parametrize("make", [qwen, jetmoe])
def test_the_loss_is_that_of_the_models_own_forward_pass_without_padding(make: Any) -> None:
    model = make()
    balance, warning = find_balance(model)
    assert warning is None
    assert balance is not None
    ids = torch.arange(12).view(2, 6)
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    output = model(input_ids=ids, attention_mask=real.long(), output_router_logits=True)
    expected = 0.25 * output.aux_loss
    torch.testing.assert_close(balance(output.router_logits, real), expected, rtol=0, atol=0)
    assert not torch.equal(balance(output.router_logits, torch.ones_like(real)), expected), (
        "padding changes nothing, so equality says nothing"
    )


@pytest.mark.parametrize("make", [lambda: adapted(qwen()), lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), lambda: adapted(glm())])
def test_a_model_without_trained_routers_needs_none(make: Any) -> None:
    assert find_balance(make()) == (None, None)


def test_a_router_that_is_trained_beside_an_adapter_counts() -> None:
    wrapped = adapted(qwen(), modules_to_save=("gate",))
    assert len(list(trained_routers(wrapped))) >= 2
    balance, warning = find_balance(wrapped)
    assert (balance is not None, warning) == (True, None)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (glm, "transformers has none for glm4_moe"),
        (hunyuan, "transformers has none for hunyuan_v1_moe"),
        (lambda: qwen(coefficient=0.0), "its config.json has router_aux_loss_coef 0"),
    ],
)
def test_routers_that_are_trained_without_such_a_loss_are_warned_of(make: Any, cause: str) -> None:
    balance, warning = find_balance(make())
    assert balance is None
    assert cause in str(warning)
    assert ("maxShare in logs/expert_usage.jsonl" in str(warning)) is (make is not hunyuan), "its experts aren't counted"


class Experts(torch.nn.Module):
    """A layer whose router is a plain one, as a model's own code may have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 2)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.shared_expert_gate = torch.nn.Linear(4, 1)


def test_the_gate_beside_experts_is_a_router_whatever_its_class() -> None:
    model = torch.nn.ModuleDict({"mlp": Experts(), "gate": torch.nn.Linear(4, 4)})
    assert list(trained_routers(model)) == ["mlp.gate"]
    assert list(trained_routers(model.requires_grad_(False))) == []
