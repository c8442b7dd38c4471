"""Operations are counted as they are done, and a run's speed follows from them."""

from __future__ import annotations

import pytest

from lockstep_spec.gpus import GPUS
from lockstep_train.report.flops import Attention, FlopCount, Matrix, count, peak_flops
from lockstep_train.report.speed import Speed, across_ranks, peak_memory_bytes

LLAMA_8B = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
"""Weights of Llama 3.1 8B without its embedding and norms."""


def test_a_frozen_weight_costs_4_operations_a_token_and_a_trained_one_6() -> None:
    counted = count([Matrix(100, trained=False, in_layer=True), Matrix(10, trained=True, in_layer=True)], attention=())
    assert counted.needed([7]) == 7 * (4 * 100 + 6 * 10)
    assert counted.active_weights == 110


def test_attention_costs_the_square_of_each_document_and_not_of_their_sum() -> None:
    counted = FlopCount(frozen=0, trained=0, in_layers=0, attention=(Attention(5),))
    assert counted.needed([3, 4]) == 6 * 5 * (9 + 16)


@pytest.mark.parametrize("attention", [Attention(1), Attention(1, 8), Attention(1, 8, chunked=True)])
@pytest.mark.parametrize("length", [5, 8, 24, 83])
def test_only_tokens_that_see_each_other_cost_attention(attention: Attention, length: int) -> None:
    window = attention.window or length
    first = (lambda token: token // window * window) if attention.chunked else (lambda token: max(0, token - window + 1))
    pairs = sum(token - first(token) + 1 for token in range(length))
    assert attention.pairs(length) == pytest.approx(2 * pairs, abs=length)  # the diagonal counts half


def test_gradient_checkpointing_adds_one_forward_pass_of_the_layers_and_not_of_the_head() -> None:
    counted = count([Matrix(100, False, in_layer=True), Matrix(50, False, in_layer=False)], attention=(Attention(2),))
    assert counted.recomputed([3]) == 2 * 100 * 3 + 2 * 2 * 9
    assert counted.recomputed([3], products=0.5, attention=0.0) == 100 * 3


def test_an_8b_model_costs_what_is_published_for_it() -> None:
    """6N a token and, at 8,192 tokens, a causal attention of 6 × 32 layers × 4,096 × 8,192: 45.0 + 6.4 GFLOP."""
    full = FlopCount(frozen=0, trained=LLAMA_8B, in_layers=0, attention=(Attention(32 * 4096),))
    assert full.needed([8192]) / 8192 == pytest.approx(45.03e9 + 6.44e9, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ],
)
def test_a_device_is_known_by_its_name(device: str, peak: float) -> None:
    assert peak_flops(device, "BF16") == (peak, None)


@pytest.mark.parametrize(
    "device", ["NVIDIA RTX A4000", "NVIDIA RTX A3000 Laptop GPU", "CPU", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_an_unknown_device_has_no_peak_and_a_reason(device: str) -> None:
    peak, reason = peak_flops(device, "BF16")
    assert peak is None
    assert device in reason


def test_fp32_has_no_mfu() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "FP32")[0] is None


def test_a_variant_stands_before_its_family() -> None:
    for device, gpu in GPUS.items():
        assert peak_flops(f"NVIDIA {device}", "BF16")[0] == gpu[0]


def test_mfu_is_the_share_of_all_devices_and_hfu_counts_what_is_computed_twice() -> None:
    speed = Speed(FlopCount(frozen=100, trained=0, in_layers=50, attention=()), devices=2, peak=1000.0, recomputed=(1.0, 1.0))
    assert speed.step(2.0, [6, 4]) == {"tokens": 10, "tokensPerSecond": 5.0, "mfu": 1.0, "hfu": 1.25, "stepSeconds": 2.0}


def test_what_is_not_known_is_null() -> None:
    assert Speed(None, 1, 1000.0, (0.0, 0.0)).step(1.0, [1])["mfu"] is None
    assert Speed(FlopCount(1, 1, 1, ()), 1, None, (1.0, 1.0)).step(1.0, [1])["hfu"] is None


def test_the_time_that_is_left_goes_by_the_median_of_the_last_fifty_steps() -> None:
    speed = Speed(None, 1, None, False)
    for seconds in [100.0] * 60 + [1.0] * 26 + [9.0] * 24:
        speed.step(seconds, [1])
    assert speed.remaining_seconds(10) == 10.0


def test_memory_is_the_most_that_was_held() -> None:
    assert 10e6 < peak_memory_bytes(on_gpu=False) < 1e12


def test_the_fullest_and_the_slowest_rank_are_told() -> None:
    assert across_ranks([(5.0, 1.0, 11.0), (9.0, 1.5, 10.0), (7.0, 4.0, 8.0)]) == {
        "peakMemoryBytes": 9.0,
        "peakReservedBytes": 11.0,
        "slowestRank": 2,
        "slowestRankSeconds": 4.0,
        "medianRankSeconds": 1.5,
    }


def test_before_the_first_step_nobody_is_slowest() -> None:
    found = across_ranks([(5.0, 0.0, 0.0), (9.0, 0.0, 0.0)])
    assert (found["peakMemoryBytes"], found["slowestRank"], found["medianRankSeconds"]) == (9.0, None, None)
    assert found["peakReservedBytes"] is None, "on CPUs nothing is reserved"
