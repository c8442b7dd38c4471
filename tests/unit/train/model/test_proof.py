"""Decisions about recordings and exports: positions, comparison, layouts, what goes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lockstep_train.logprobs import positions_of, stale
from lockstep_train.model.layouts import StoredPiece, TensorLayout
from lockstep_train.model.updates import Experts, LowRank
from lockstep_train.proof.compare import compare, difference
from lockstep_train.proof.layouts import EngineRefusal, refuse_half, refuse_settings, stored_factors


@pytest.mark.parametrize(("count", "positions"), [(5, [0, 1, 2, 3]), (9, [1, 3, 5, 7]), (96, [22, 46, 70, 94])])
def test_positions_are_four_and_never_the_last_tokens(count: int, positions: list[int]) -> None:
    assert positions_of(count) == positions


def test_a_prompt_of_four_tokens_is_too_short() -> None:
    with pytest.raises(ValueError, match="4 tokens"):
        positions_of(4)


def row(change: float = 0.0, first: int = 0) -> list[tuple[int, float]]:
    return [(token, -1.0 - token + change) for token in range(first, first + 64)]


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (row(), 0.0),
        (row(0.25), 0.25),
        (row(first=32), 0.0),
        (row(first=33), math.inf),
        ([], math.inf),
        ([(t, math.nan) for t in range(64)], math.inf),
    ],
)
def test_lists_differ_by_their_common_tokens_or_have_too_few(theirs: list[tuple[int, float]], expected: float) -> None:
    assert difference(row(), theirs) == expected


@pytest.mark.parametrize(
    ("precision", "base", "read", "words"),
    [
        ("FP32", 1.0, 0.0005, "equal: vLLM gives"),
        ("FP32", 1.0, 0.002, "not equal: vLLM gives"),
        ("BF16", 1.0, 0.04, "equal: vLLM gives"),
        (
            "FP32",
            0.015625,
            0.0,
            "this proves nothing: vLLM is equal (largest difference 0, bound 0.001), but training itself changed only 0.016",
        ),
    ],
)
def test_a_verdict_is_equal_unequal_or_proves_nothing(precision: str, base: float, read: float, words: str) -> None:
    recorded = {"precision": precision, "prompts": [{"top": [row()] * 4, "base_top": [row(base)] * 4}]}
    verdict = compare(recorded, [{"top": [*[row()] * 3, row(read)]}])
    assert verdict.words("vLLM").startswith(words)


def test_recordings_stay_with_their_commits_and_the_two_newest_at_any_rate() -> None:
    recorded = ["step-2.a1", "step-4.a1", "step-10.a1", "step-4.a2", "step-6.a2", "note"]
    assert stale(recorded, ["step-4.a1"]) == ["step-2.a1", "step-10.a1"]


def nothing(*_: Any) -> torch.Tensor:
    raise AssertionError("a layout reads no values")


def piece(name: str, numel: int) -> StoredPiece:
    return StoredPiece(f"{name}.weight", 0, numel)


EXPERTS, RANK, OUT, IN = 2, 3, 4, 5
UP = TensorLayout((EXPERTS, OUT, IN), tuple(piece(f"moe.{expert}.{name}", 10) for expert in range(2) for name in ("w1", "w3")))
DOWN = TensorLayout((EXPERTS, IN, OUT), tuple(piece(f"moe.{expert}.w2", 20) for expert in range(2)))
UPDATE = Experts("a", "b", 1.0, EXPERTS, OUT, IN, transposed=False, read=nothing)
SHAPES = {"a": (EXPERTS * RANK, IN), "b": (OUT, RANK * EXPERTS)}


def test_a_stack_of_experts_becomes_factors_under_the_files_names_and_the_other_stack_gets_zeros() -> None:
    factors = {
        factor.name.removeprefix("base_model.model."): factor
        for factor in stored_factors({"e.up": UPDATE}, SHAPES, {"e.up": UP, "e.down": DOWN})
    }
    assert len(factors) == 12
    assert {name: factor.shape for name, factor in factors.items() if ".1." in name} == {
        "moe.1.w1.lora_A.weight": (3, 5), "moe.1.w1.lora_B.weight": (2, 3), "moe.1.w3.lora_A.weight": (3, 5),
        "moe.1.w3.lora_B.weight": (2, 3), "moe.1.w2.lora_A.weight": (3, 4), "moe.1.w2.lora_B.weight": (5, 3),
    }  # fmt: skip
    assert factors["moe.1.w2.lora_B.weight"].source is None
    a, b = torch.randn(SHAPES["a"]), torch.randn(SHAPES["b"])
    whole = torch.einsum("ore,eri->eoi", b.view(OUT, RANK, EXPERTS), a.view(EXPERTS, RANK, IN))
    parts = [factors[f"moe.1.w3.lora_{letter}.weight"].cut(values) for letter, values in (("B", b), ("A", a))]
    assert torch.allclose(parts[0] @ parts[1], whole[1, 2:])


@pytest.mark.parametrize(
    ("update", "layout"),
    [
        (Experts("a", "b", 1.0, EXPERTS, OUT, IN, transposed=True, read=nothing), UP),
        (UPDATE, TensorLayout((EXPERTS, OUT, IN), (piece("experts", 40),))),
        (LowRank("a", "b", 1.0, nothing), TensorLayout((OUT, IN), (StoredPiece("qkv.weight", 20, 20),))),
    ],
)
def test_weights_that_are_no_whole_rows_of_one_expert_are_refused(update: Any, layout: TensorLayout) -> None:
    with pytest.raises(EngineRefusal):
        stored_factors({"e.up": update}, SHAPES, {"e.up": layout})


@pytest.mark.parametrize(
    ("engine", "change", "reason"),
    [
        ("gguf", {"use_dora": True}, "DoRA"),
        ("vllm", {"modules_to_save": ["lm_head"]}, "trained whole (lm_head)"),
        ("vllm", {"r": 513}, "largest rank is 512, and this one is 513"),
    ],
)
def test_settings_that_an_engine_has_no_place_for_are_refused(engine: str, change: dict[str, Any], reason: str) -> None:
    usual = {"use_dora": False, "modules_to_save": None, "r": 8}
    refuse_settings(engine, usual)
    with pytest.raises(EngineRefusal) as refused:
        refuse_settings(engine, usual | change)
    assert reason in str(refused.value)


def test_peft_layout_of_experts_needs_both_stacks_in_vllm() -> None:
    refuse_half({"l.experts.gate_up_proj": UPDATE, "l.experts.down_proj": UPDATE})
    with pytest.raises(EngineRefusal, match=r"l\.experts\.down_proj has none"):
        refuse_half({"l.experts.gate_up_proj": UPDATE})
