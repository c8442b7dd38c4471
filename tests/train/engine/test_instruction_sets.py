"""What is computed holds for the instructions of a smaller CPU, too: the numeric tests once more, with kernels for any x86-64.

torch, oneDNN and MKL choose their kernels by the CPU and by these variables. bitsandbytes goes by the CPU alone; test_models.py answers in
its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer

from train.checkpoint.test_merge import FP32_TOLERANCE
from train.checkpoint.test_merge import VARIANTS as MERGES
from train.models.test_models import PACKED, VARIANTS, Results, same_loss, train_groups

SMALL_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
TRAINED = {name: VARIANTS[name] for name in ("dora", "qwen2 in BF16", "glm4_moe experts", "full", "NF4")}

MERGED = {name: MERGES[name] for name in ("llama", "dora", "glm4_moe experts", "full")}
"""Sums of their own: of a layer, of a norm, of experts, and none."""


@pytest.fixture(scope="module")
def small_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("small-cpu"), **SMALL_CPU)
    yield server
    server.close()


def test_the_ranks_compute_with_fewer_instructions(small_cpu: ForkServer) -> None:
    small_cpu.run("instructions_are", [None], arguments={"capability": "DEFAULT"})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_have_the_losses_and_gradients_of_their_documents_alone(small_cpu: ForkServer, model: Path, attention: str) -> None:
    small_cpu.run("packed_like_unpacked", [None], arguments={"model": str(model), "attention": attention, "apart": True})


def test_isolation_is_bitwise(small_cpu: ForkServer, model: Path) -> None:
    small_cpu.run("isolation_of", [None], arguments={"model": str(model)})


def test_the_tiled_loss_and_its_gradients_are_the_plain_ones(small_cpu: ForkServer) -> None:
    small_cpu.run("tiled_loss_beside_plain_one", [None])


@pytest.fixture(scope="module")
def trained(small_cpu: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return train_groups(small_cpu, tmp_path_factory.mktemp("kinds"), TRAINED, {})


@pytest.mark.parametrize("variant", TRAINED)
def test_both_stages_give_the_losses_of_one_process(trained: Results, variant: str) -> None:
    expected = trained["one process"][variant]["losses"]
    assert trained["Stage2"][variant]["losses"] == same_loss(variant, expected)
    if variant not in PACKED:
        assert trained["Stage3"][variant]["losses"] == same_loss(variant, expected)


@pytest.mark.parametrize("variant", [name for name in TRAINED if name != "full"])
def test_the_exported_adapter_gives_exactly_the_live_models_logits_in_peft(trained: Results, variant: str) -> None:
    assert trained["Stage2"][variant]["difference"] == 0.0


@pytest.fixture(scope="module")
def merged(small_cpu: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("merged")
    return small_cpu.run_each("merge_variants", 1, MERGED, folder / "results.json", folder=str(folder))


@pytest.mark.parametrize("variant", MERGED)
def test_the_merged_model_gives_the_live_models_logits(merged: Any, variant: str) -> None:
    assert merged[variant]["difference"] < FP32_TOLERANCE
