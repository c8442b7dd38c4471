"""Every kind of model and adapter, trained for three steps by one process and by two ranks under Stage2 and Stage3, with gradient
checkpointing on, but for those that are `kept`. All variants of a stage share one group of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, Outcomes

from support.rounding import LOW_PRECISION_ROUNDINGS, forward_roundings, gradient_roundings, tolerance

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "dora": {"family": "llama", "lora": {"dora": True}},
    "whole layers": {"family": "llama", "lora": {"modulesToSave": ["embed_tokens", "lm_head"]}},
    "whole layer, tied": {"family": "tied", "lora": {"modulesToSave": ["embed_tokens"]}},
    "qwen2 in BF16": {"family": "qwen2", "precision": "BF16"},
    "qwen3, rslora": {"family": "qwen3", "lora": {"rankStabilized": True}},
    "glm4_moe experts": {"family": "glm4_moe", "lora": {"targetParameters": EXPERTS}},
    "qwen3_moe": {"family": "qwen3_moe"},
    "qwen3_moe kept": {"family": "qwen3_moe", "gc": False},
    "full qwen3_moe kept": {"family": "qwen3_moe unbalanced", "gc": False, "method": "Full", "learningRate": "2e-3"},
    "qwen3_moe experts": {"family": "qwen3_moe", "lora": {"targetParameters": EXPERTS[:1]}},
    "mixtral experts": {"family": "mixtral", "lora": {"targetParameters": EXPERTS}},
    "llama4_text": {"family": "llama4_text"},
    "gemma3": {"family": "gemma3"},
    "mistral3": {"family": "mistral3"},
    "qwen3_vl": {"family": "qwen3_vl"},
    "full mistral3": {"family": "mistral3", "method": "Full", "learningRate": "2e-3"},
    "full": {"family": "tied", "method": "Full", "learningRate": "2e-3"},
    "full glm4_moe": {"family": "glm4_moe", "method": "Full", "learningRate": "2e-3"},
    "NF4": {"family": "blocks", "quantization": "NF4", "inferenceFormat": False},
    "NF4 evaluated": {"family": "blocks", "quantization": "NF4", "inferenceFormat": True, "evaluated": True},
}
STARVED = {"starved": {"family": "glm4_moe", "lora": {"targetParameters": EXPERTS}, "starve": True}}
PACKED = [name for name, variant in VARIANTS.items() if "quantization" in variant]
ADAPTERS = [name for name in VARIANTS if not name.startswith("full")]
MOE = [name for name in VARIANTS if "moe" in name or "mixtral" in name]
STEP_TOKENS = 24 + 19 + 14 + 9
"""Of all ranks, without padding."""
FORWARD = forward_roundings(hidden=64, intermediate=128, attention=64, vocabulary=96, sequence=24)
FP32_TOLERANCE = tolerance(gradient_roundings(FORWARD, STEP_TOKENS))
BF16_TOLERANCE = tolerance(LOW_PRECISION_ROUNDINGS, "BF16", terms=STEP_TOKENS)

Results = dict[str, Outcomes]


@pytest.fixture(scope="module")
def results(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return train_groups(ranks, tmp_path_factory.mktemp("kinds"), VARIANTS, STARVED)


def train_groups(ranks: ForkServer, folder: Path, variants: dict[str, Any], of_two: dict[str, Any]) -> Results:
    """Group → variant → what came out; see cases_models.py."""
    groups = {
        "one process": ("Stage2", 1, variants),
        "Stage2": ("Stage2", 2, variants | of_two),
        "Stage3": ("Stage3", 2, variants | of_two),
    }
    return {
        group: ranks.run_each("model_variants", size, chosen, folder / f"{group}.json", folder=str(folder), stage=stage)
        for group, (stage, size, chosen) in groups.items()
    }


def same_loss(variant: str, loss: float | list[float]) -> Any:
    return pytest.approx(loss, rel=BF16_TOLERANCE if "BF16" in variant else FP32_TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_stages_give_the_losses_of_one_process(results: Results, variant: str) -> None:
    expected = results["one process"][variant]["losses"]
    assert len(expected) == 3
    assert all(after != same_loss(variant, before) for before, after in itertools.pairwise(expected)), "equal losses say nothing"
    assert results["Stage2"][variant]["losses"] == same_loss(variant, expected)
    if variant not in PACKED:
        assert results["Stage3"][variant]["losses"] == same_loss(variant, expected)


@pytest.mark.parametrize("group", ["one process", "Stage2"])
def test_evaluations_between_steps_change_nothing_that_nf4_learns_on_any_cpu(results: Results, group: str) -> None:
    """Neither where the CPU has instructions for which bitsandbytes would take another format."""
    assert results[group]["NF4 evaluated"]["losses"] == results[group]["NF4"]["losses"]


@pytest.mark.parametrize("variant", ADAPTERS)
@pytest.mark.parametrize("group", ["Stage2", "Stage3"])
def test_the_exported_adapter_gives_exactly_the_live_models_logits_in_peft(results: Results, group: str, variant: str) -> None:
    if group == "Stage3" and variant in PACKED:
        assert "can't be used with zeroStage Stage3" in results[group][variant]["refused"]
        return
    result = results[group][variant]
    assert result["difference"] == 0.0
    assert result["moved"] > 0.5, "the adapter changes nothing, so equal logits say nothing"


@pytest.mark.parametrize("variant", ADAPTERS)
def test_the_adapters_names_are_those_that_peft_writes(results: Results, variant: str) -> None:
    result = results["Stage2"][variant]
    assert result["written"] == result["peft"]
    if variant not in PACKED:
        assert results["Stage3"][variant]["names"] == result["names"]


def test_the_names_that_peft_treats_in_ways_of_their_own_are_so(results: Results) -> None:
    prefix = "base_model.model.model.layers.1"
    assert f"{prefix}.self_attn.q_proj.lora_magnitude_vector" in results["Stage3"]["dora"]["written"]
    assert {f"{prefix}.mlp.experts.base_layer.lora_A.weight", f"{prefix}.mlp.experts.lora_B.weight"} < set(
        results["Stage3"]["glm4_moe experts"]["written"]
    )
    assert {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"} < set(
        results["Stage3"]["whole layers"]["written"]
    )
    tied = results["Stage3"]["whole layer, tied"]["written"]
    assert "base_model.model.model.embed_tokens.weight" in tied
    assert not any("lm_head" in name for name in tied)


def test_full_fine_tuning_trains_every_weight_and_a_tied_one_once(results: Results) -> None:
    for group in ("Stage2", "Stage3"):
        shapes = results[group]["full"]["shapes"]
        assert shapes["model.embed_tokens.weight"] == [96, 36]
        assert "lm_head.weight" not in shapes
        assert len(shapes) == 2 * 9 + 2  # attention 4, MLP 3 and two norms a layer; embeddings and the last norm
        assert results[group]["full glm4_moe"]["shapes"]["model.layers.1.mlp.experts.gate_up_proj"] == [6, 40, 36]


@pytest.mark.parametrize("variant", MOE)
def test_each_routed_token_is_counted_once_despite_gradient_checkpointing(results: Results, variant: str) -> None:
    counted = results["one process"][variant]["usage"]
    for counts in counted.values():
        assert sum(counts) == 2 * 3 * STEP_TOKENS  # top_k is 2, and there are three steps
    assert results["Stage2"][variant]["usage"] == results["Stage3"][variant]["usage"] == counted


def test_an_expert_that_no_token_of_one_rank_reaches_does_not_stop_the_others(results: Results) -> None:
    two, three = results["Stage2"]["starved"], results["Stage3"]["starved"]
    assert two["losses"] == same_loss("starved", three["losses"])
    assert two["usage"]["1"][0] == three["usage"]["1"][0] == 3 * (24 + 14)  # all tokens of rank 0, none of rank 1
