"""The arithmetic of a run's size. Every expected number is worked out by hand in the comment beside it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.training import Data, Training
from lockstep.plan.ahead.traffic import commit_bytes, gigabits_per_second, saves, step_traffic, total_bytes
from lockstep.plan.render.run import trainer_config, training_json
from lockstep_spec.choices import Method, Precision, Quantization, Recompute, ZeroStage
from lockstep_spec.families import FAMILIES, UnknownModel, moved_targets, shape_from_config
from lockstep_spec.fit import plan_memory
from lockstep_spec.length import plan
from lockstep_spec.memory import Place, trained_elements
from lockstep_spec.settings import Settings, size_settings
from lockstep_spec.training import LoraConfig
from lockstep_train.base.runfile import parse_training
from support.checkout import ROOT

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
# 8 words, 4 wide, 1 layer, 2 heads of 2, feed-forward 6, head and embedding apart. Elements: embedding 8×4 = 32; queries, keys, values,
# output 4×4 each = 64; gate, up, down 6×4 each = 72; three norms of 4 = 12; head 32. Together 212.
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2,
}  # fmt: skip
# An adapter of rank 2 on q_proj and v_proj: 2 × (4 + 4) each, 32 elements; 64 bytes in BF16.
SETTINGS = Settings(
    max_length=16,
    micro_batch_size=2,
    adapter=LoraConfig(2, 2, 0.0, ("q_proj", "v_proj")),
    zero_stage=ZeroStage.STAGE2,
    recompute=Recompute.NONE,
)
PLACE = Place(world_size=4, ranks_per_node=2, gpu=True)


def flows(place: Place = PLACE, accumulation: int = 1, **changes: Any) -> dict[str, int]:
    found = step_traffic(shape_from_config(TINY), replace(SETTINGS, **changes), place, accumulation)
    return {flow.name: flow.node_bytes for flow in found}


def test_parameters_follow_from_config_json() -> None:
    assert shape_from_config(TINY).numel == 212
    # Llama-3.1-8B: embedding and head 2 × 128256×4096 = 1,050,673,152; a layer 2 × 4096×4096 + 2 × 1024×4096 + 3 × 14336×4096 + 2 × 4096
    # = 218,112,000, of which there are 32; the last norm 4096. Meta states 8.03 billion.
    assert shape_from_config(LLAMA_8B).numel == 1_050_673_152 + 32 * 218_112_000 + 4096 == 8_030_261_248


@pytest.mark.parametrize("config", [{}, {"model_type": "mamba"}, {key: value for key, value in TINY.items() if key != "vocab_size"}])
def test_a_config_that_does_not_say_enough_is_refused_and_not_guessed(config: dict[str, Any]) -> None:
    with pytest.raises(UnknownModel, match=r"known here are|it has no vocab_size"):
        shape_from_config(config)
    assert "llama" in FAMILIES


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number from 1"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; it must be a whole number from 1"),
        ({"num_hidden_layers": None}, "it has no num_hidden_layers"),
        ({"num_hidden_layers": [2]}, "num_hidden_layers is [2]; it must be a whole number from 1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number from 1"),
        ({"num_attention_heads": 3}, "hidden_size 64 is no multiple of num_attention_heads 3, and there is no head_dim"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2'; it must be a whole number from 1"),
        ({"head_dim": -1}, "head_dim is -1; it must be a whole number from 1"),
        ({"vocab_size": True}, "vocab_size is True; it must be a whole number from 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a whole number from 1"),
        ({"num_experts_per_tok": {}}, "num_experts_per_tok is {}; it must be a whole number from 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list of layers' numbers"),
        ({"mlp_only_layers": [[]]}, "mlp_only_layers is [[]]; it must be a list of layers' numbers"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"model_type": ["llama"]}, "model_type is ['llama']; known here are"),
    ],
)
def test_an_impossible_value_in_a_config_is_named(stated: dict[str, Any], message: str) -> None:
    config = {**EXPERTS, **stated}
    with pytest.raises(UnknownModel, match=f"^{re.escape(message)}"):
        shape_from_config(config)


def test_keys_of_a_config_that_have_odd_values_and_count_for_no_size_are_no_hindrance() -> None:
    assert shape_from_config({**TINY, "kv_lora_rank": ["x"], "num_experts_per_token": {}, "architectures": 1}) == shape_from_config(TINY)


@pytest.mark.parametrize("model_type", [["qwen3_moe"], {"qwen3_moe": 1}, 1, None])
def test_a_model_type_that_is_no_text_moves_no_target(model_type: object) -> None:
    assert moved_targets("qwen3_moe", ["gate_proj"]) and moved_targets(model_type, ["gate_proj"]) == ""


def test_a_size_that_is_null_is_one_that_is_not_there() -> None:
    absent = shape_from_config(EXPERTS)
    assert shape_from_config({**EXPERTS, "head_dim": None, "tie_word_embeddings": None, "mlp_only_layers": None}) == absent


def test_the_trainer_and_the_command_line_read_the_same_settings_of_one_document() -> None:
    given = Training.model_validate(
        {
            "model": {"name": "/models/a", "quantization": "NF4"}, "lora": {"rank": 4, "modulesToSave": ["embed_tokens"]},
                "zeroStage": "Stage1",
            "data": Data(path="/d.jsonl", max_length=77).to_dict() | {"path": "/d.jsonl"},
                "optimization": {"microBatchSize": 3, "recompute": "All"},
        }
    )  # fmt: skip
    told = size_settings(trainer_config(given))
    assert told == size_settings(parse_training(training_json(given)))
    assert (told.max_length, told.quantization, told.adapter.modules_to_save) == (77, Quantization.NF4, ("embed_tokens",))


def test_stage_1_reduces_gradients_once_and_stage_2_after_every_micro_batch() -> None:
    # The adapter's 64 bytes: all-reduced over 4 ranks 2 × 3/4 × 64 = 96; gathered after the update 3/4 × 64 = 48.
    assert flows(zero_stage=ZeroStage.STAGE1, accumulation=5) == {"gradients, all-reduced": 96, "updated weights, gathered": 48}
    assert flows(zero_stage=ZeroStage.STAGE2, accumulation=5) == {"gradients, all-reduced": 480, "updated weights, gathered": 48}


def test_stage_3_gathers_frozen_weights_for_every_pass() -> None:
    # Base 212 × 2 = 424 bytes. Two passes (forward, backward): 2 × 424 × 3/4 = 636; the adapter 2 × 64 × 3/4 = 96; gradients 64 × 3/4 = 48.
    expected = {"frozen weights, gathered": 636, "trained weights, gathered": 96, "gradients, reduce-scattered": 48}
    assert flows(zero_stage=ZeroStage.STAGE3) == expected
    # With what is computed again a third pass: 3 × 424 × 3/4 = 954, 3 × 64 × 3/4 = 144; four micro-batches: all of it four times.
    thrice = flows(zero_stage=ZeroStage.STAGE3, recompute=Recompute.ALL, accumulation=4)
    assert thrice == {"frozen weights, gathered": 3816, "trained weights, gathered": 576, "gradients, reduce-scattered": 192}


def test_a_second_copy_on_each_node_leaves_only_the_adapter_to_cross() -> None:
    kept = flows(replace(PLACE, partition=2), zero_stage=ZeroStage.STAGE3)
    assert kept == {"trained weights, gathered": 96, "gradients, reduce-scattered": 48}


def test_full_fine_tuning_sends_every_weight_as_trained() -> None:
    # 424 bytes: gradients 2 × 3/4 × 424 = 636, weights 3/4 × 424 = 318; in FP32 twice that.
    assert flows(method=Method.FULL) == {"gradients, all-reduced": 636, "updated weights, gathered": 318}
    assert flows(method=Method.FULL, precision=Precision.FP32) == {"gradients, all-reduced": 1272, "updated weights, gathered": 636}
    # Stage3: 2 × 424 × 3/4 = 636 gathered, 424 × 3/4 = 318 reduce-scattered; nothing is frozen.
    full = flows(method=Method.FULL, zero_stage=ZeroStage.STAGE3)
    assert full == {"trained weights, gathered": 636, "gradients, reduce-scattered": 318}


def test_one_node_sends_nothing() -> None:
    assert flows(Place(world_size=4, ranks_per_node=4, gpu=True)) == {}


def test_commits_hold_twelve_bytes_a_trained_element_or_the_weights_alone() -> None:
    shape = shape_from_config(TINY)
    # 32 trained elements: 384 bytes Full, 64 Lite in BF16; on two volumes twice.
    assert trained_elements(shape, SETTINGS) == 32
    assert commit_bytes(shape, SETTINGS, full=True) == 384
    assert commit_bytes(shape, SETTINGS, full=False) == 64
    assert commit_bytes(shape, SETTINGS, full=True, copies=2) == 768


def test_a_commit_at_every_nth_step_and_one_at_the_end() -> None:
    # 1502 steps, every 100: 15 and the last; kept 3, the one being written, the best: 5 × 10 bytes. 1500 steps: the 15th is the last.
    assert saves(1502, 100, 3, 10, evaluates=True) == (16, 50)
    assert saves(1500, 100, 3, 10, evaluates=False) == (15, 40)
    assert saves(5, 100, 3, 10, evaluates=True) == (1, 10)


def test_a_run_is_one_stream_of_samples_over_all_epochs() -> None:
    # 100 samples three times, 32 a step: 300 / 32 = 9.4, so 10 steps; 4 ranks of micro-batch 2 take 8 at once, 4 times a step.
    found = plan(count=100, epochs=3, max_steps=None, global_batch_size=32, world_size=4, micro=2)
    assert (found.total_steps, found.accumulation) == (10, 4)


def test_total_and_needed_bandwidth() -> None:
    found = step_traffic(shape_from_config(TINY), SETTINGS, PLACE, 1)
    assert total_bytes(found) == 144
    assert gigabits_per_second(125e6, 1.0) == 1.0  # 125 MB a second are 1,000,000,000 bits


ATTENTION = LoraConfig(16, 16, 0.0, ("q_proj", "k_proj", "v_proj", "o_proj"))
MEASURED = {
    "8b-lora-4k": (LLAMA_8B, Settings(4096, 2, ATTENTION, ZeroStage.STAGE2, recompute=Recompute.NONE), 57.9),
    "qwen3-30b-a3b": (
        {
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        Settings(4096, 2, ATTENTION, ZeroStage.STAGE2, recompute=Recompute.ALL), 67.0,
    ),
    "glm-air-4-layers-16k": (
        json.loads((ROOT / "manifests/samples/models/shapes.json").read_text())["zai-org/GLM-4.5-Air"] | {"num_hidden_layers": 4},
        Settings(16384, 1, ATTENTION, ZeroStage.STAGE2, recompute=Recompute.ALL), 33.5,
    ),
}  # fmt: skip
"""Rows of docs/benchmarks.md, and the GB that an H200 gave each."""


@pytest.mark.parametrize("row", MEASURED)
def test_the_plan_is_not_below_what_a_gpu_gave_and_at_most_a_tenth_above(row: str) -> None:
    config, settings, gigabytes = MEASURED[row]
    planned = plan_memory(shape_from_config(config), settings, Place(1, 1, gpu=True), 141 * 10**9).total_bytes / 1e9
    assert gigabytes <= planned <= 1.1 * gigabytes
    figures = (ROOT / "docs/benchmarks.md").read_text()
    assert f"{planned:.1f}" in figures and f"{gigabytes}" in figures
