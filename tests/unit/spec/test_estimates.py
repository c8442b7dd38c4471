"""Figures of a memory plan, and of what it counts of each estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep_spec.activations import tile_bytes
from lockstep_spec.families import shape_from_config
from lockstep_spec.fit import plan_memory, relief
from lockstep_spec.memory import Item, ahead_elements, bucket_elements, live_elements
from unit.spec.test_sizes import LLAMA_8B, PLACE, SETTINGS, TINY


@pytest.mark.parametrize(("tokens", "tile_tokens"), [(16, 16), (523, 523), (524, 523.25), (100_000, 523.25)])
def test_logits_of_2_to_the_26_words_are_there_at_once(tokens: int, tile_tokens: float) -> None:
    settings = replace(SETTINGS, max_length=tokens, micro_batch_size=1)
    # in BF16, once more in FP32, and their logarithms
    assert tile_bytes(shape_from_config(LLAMA_8B), settings) == pytest.approx((2 + 4 + 4) * tile_tokens * 128256, rel=1e-4)


def test_half_of_what_is_not_certain_counts_before_a_run_is_refused() -> None:
    plan = plan_memory(shape_from_config(TINY), SETTINGS, PLACE, 1)
    assert replace(plan, items=(Item("weights", 100, certain=True), Item("guess", 100, certain=False))).least_bytes == 150


@pytest.mark.parametrize(("length", "advised"), [(512, ["data.maxLength: 256"]), (511, [])])
def test_sequences_of_256_tokens_are_the_shortest_that_are_advised(length: int, advised: list[str]) -> None:
    plan = plan_memory(shape_from_config(LLAMA_8B), replace(SETTINGS, max_length=length), PLACE, 1)
    assert [text.split(" (")[0] for text in relief(plan) if "maxLength" in text] == advised


def test_deepspeed_s_own_figures_hold_for_a_model_whose_layers_are_small() -> None:
    tiny, large = shape_from_config(TINY), shape_from_config({**LLAMA_8B, "hidden_size": 16384, "intermediate_size": 65536})
    assert (ahead_elements(tiny), live_elements(tiny)) == (50_000_000, 1_000_000_000)
    assert ahead_elements(large) > 3 * 16384 * 65536 < live_elements(large)
    assert (bucket_elements(212), bucket_elements(10**10)) == (212, 500_000_000)
