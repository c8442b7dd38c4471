"""The memory plan beside what tensors really took: dense models, mixtures of experts and other architectures, adapters and all weights, in
every stage, with all that layers compute kept, some and none, with tiled and with whole logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, Outcomes

TOLERANCE = 0.1
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE: dict[str, dict[str, Any]] = {
    "adapter": {"family": "llama", "stage": "Stage2"},
    "adapter, sharded, recomputed": {"family": "llama", "stage": "Stage3", "gc": True},
    "capped logits, sharded, recomputed": {"family": "gemma2", "stage": "Stage3", "gc": True},
    "all weights": {"family": "llama", "stage": "Stage2", "method": "Full"},
    "all weights, sharded": {"family": "llama", "stage": "Stage3", "method": "Full"},
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "adapter": {"family": "qwen3_moe", "stage": "Stage2"},
    "adapter, sharded": {"family": "qwen3_moe", "stage": "Stage3"},
    "adapter, sharded, recomputed": {"family": "qwen3_moe", "stage": "Stage3", "gc": True},
    "adapters of experts, sharded": {"family": "qwen3_moe", "stage": "Stage3", "lora": {"targetParameters": EXPERTS}},
    "adapters of experts, recomputed": {"family": "qwen3_moe", "stage": "Stage2", "gc": True, "lora": {"targetParameters": EXPERTS}},
    "all weights, sharded": {"family": "qwen3_moe", "stage": "Stage3", "method": "Full"},
    "adapter, experts weighed in FP32, recomputed": {"family": "glm4_moe", "stage": "Stage2", "gc": True},
}
MIXED: dict[str, dict[str, Any]] = {
    "adapter, norms and gates again": {"family": "llama", "stage": "Stage2", "gc": ["NORMS", 6]},
    "adapter, sharded, all but attention again in half of the layers": {"family": "llama", "stage": "Stage3", "gc": ["ATTENTION", 3]},
    "all weights, norms and gates again in two layers": {"family": "llama", "stage": "Stage2", "method": "Full", "gc": ["NORMS", 2]},
    "adapter, sharded, norms and gates again in half of the layers": {"family": "qwen3_moe", "stage": "Stage3", "gc": ["NORMS", 3]},
    "adapters of experts, sharded, all again in half of the layers": {
        "family": "qwen3_moe",
        "stage": "Stage3",
        "gc": ["ALL", 3],
        "lora": {"targetParameters": EXPERTS},
    },
    "adapters of experts, norms and gates again in half of the layers": {
        "family": "qwen3_moe",
        "stage": "Stage2",
        "gc": ["NORMS", 3],
        "lora": {"targetParameters": EXPERTS},
    },
}
"""Layers at two levels."""
LATENT = ["q_b_proj", "kv_b_proj", "o_proj"]
OTHERS: dict[str, dict[str, Any]] = {
    "adapter, FP32": {"family": "llama", "stage": "Stage1", "precision": "FP32"},
    "adapter on the head, recomputed": {"family": "llama", "stage": "Stage2", "gc": True, "lora": {"targetModules": ["q_proj", "lm_head"]}},
    "latent attention": {"family": "deepseek_v3", "precision": "FP32", "stage": "Stage2", "lora": {"targetModules": LATENT}},
    "latent attention, sharded, recomputed": {"family": "deepseek_v3", "stage": "Stage3", "gc": True, "lora": {"targetModules": LATENT}},
    "one fused projection, all weights": {"family": "gpt2", "precision": "FP32", "stage": "Stage2", "method": "Full"},
    "no gate": {"family": "opt", "precision": "FP32", "stage": "Stage2", "lora": {"targetModules": ["q_proj", "v_proj", "fc2"]}},
}
"""Most in FP32, which takes CPUs without BF16 a few seconds. What layers keep in BF16 is measured in test_sizes.py."""
NO_TENSORS = ("the process itself", "a save's copy")
"""The latter is memory that ranks share with the threads that write it."""


@pytest.fixture(scope="module")
def dense(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return measured(ranks, tmp_path_factory.mktemp("dense"), DENSE)


@pytest.fixture(scope="module")
def of_experts(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return measured(ranks, tmp_path_factory.mktemp("experts"), OF_EXPERTS)


@pytest.fixture(scope="module")
def mixed(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return measured(ranks, tmp_path_factory.mktemp("mixed"), MIXED)


@pytest.fixture(scope="module")
def others(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return measured(ranks, tmp_path_factory.mktemp("others"), OTHERS)


def measured(ranks: ForkServer, folder: Path, variants: dict[str, Any]) -> Outcomes:
    return ranks.run_each("peak_variants", 2, variants, folder / "peaks.json", folder=str(folder))


def off(result: dict[str, Any]) -> float:
    """How far the plan lies above (or below: negative) the highest peak, as a share of it."""
    items = {name: size for name, size in result["items"].items() if not name.startswith(NO_TENSORS)}
    return sum(items.values()) / max(result["peaks"].values()) - 1


@pytest.mark.parametrize("variant", DENSE)
def test_the_plan_of_a_dense_model_is_what_its_tensors_take(dense: Outcomes, variant: str) -> None:
    assert abs(off(dense[variant])) < TOLERANCE, dense[variant]


@pytest.mark.long
@pytest.mark.parametrize("variant", OF_EXPERTS)
def test_the_plan_of_a_mixture_of_experts_is_what_its_tensors_take(of_experts: Outcomes, variant: str) -> None:
    """Where nothing is computed again, too, no rank keeps gathered experts from the forward to the backward pass."""
    assert abs(off(of_experts[variant])) < TOLERANCE, of_experts[variant]


@pytest.mark.long
@pytest.mark.parametrize("variant", MIXED)
def test_the_plan_of_layers_at_two_levels_is_what_its_tensors_take(mixed: Outcomes, variant: str) -> None:
    assert abs(off(mixed[variant])) < TOLERANCE, mixed[variant]


@pytest.mark.long
@pytest.mark.parametrize("variant", OTHERS)
def test_the_plan_of_another_architecture_or_head_is_what_its_tensors_take(others: Outcomes, variant: str) -> None:
    assert abs(off(others[variant])) < TOLERANCE, others[variant]
