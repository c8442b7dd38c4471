"""The loss, the precisions, what an update needs, and steps that are left out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, Outcomes, RunFile

from support.rounding import LOW_PRECISION_ROUNDINGS, SAME_LOSS, tolerance


def records(folder: Path, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / f"{log}.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder, "train_log")]


def test_the_loss_is_computed_without_whole_logits_and_gathers_the_last_layer_once(ranks: ForkServer, run_file: RunFile) -> None:
    """Nothing is kept gathered between forward and backward, as with a model that is large."""
    large = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    path = run_file("tiles", zeroStage="Stage3", deepspeed={"zero_optimization": {f"stage3_{name}": 0 for name in large}})
    ranks.run("tiled_loss_of_a_run", [path] * 2)


def test_groups_that_deepspeed_makes_wait_as_long_as_the_setting_says(ranks: ForkServer) -> None:
    ranks.run("timeouts_of_groups", [None], arguments={"timeout_seconds": 123})


def test_the_tiled_loss_and_its_gradients_are_the_plain_ones(ranks: ForkServer) -> None:
    ranks.run("tiled_loss_beside_plain_one", [None])


def test_a_model_that_caps_or_scales_its_logits_is_told_apart(ranks: ForkServer) -> None:
    ranks.run("models_that_change_their_logits", [None])


def test_the_last_layer_with_an_adapter_trains_from_whole_logits_and_says_so(ranks: ForkServer, run_file: RunFile) -> None:
    path = run_file(
        "head", lora={"targetModules": ["q_proj", "lm_head"]}, optimization={"maxSteps": 1, "globalBatchSize": 2}, evaluation=None
    )
    ended = ranks.run("main", [path])
    assert "The loss is computed from whole logits, which takes more memory: the model's last layer is a Linear" in ended.output


@pytest.mark.parametrize(
    ("stage", "chosen", "above"),
    [
        ("Stage1", None, 8 / 512),
        ("Stage2", None, 8 / 512),
        ("Stage3", None, 8 / 512),
        ("Stage1", "bf16", 0.0),
        ("Stage2", "bf16", 0.0),
        ("Stage3", "bf16", 0.0),
    ],
)
def test_gradients_of_micro_batches_are_summed_in_fp32_unless_bf16_is_chosen(
    ranks: ForkServer, run_file: RunFile, stage: str, chosen: str | None, above: float
) -> None:
    raw = {"data_types": {"grad_accum_dtype": chosen}} if chosen else None
    path = run_file(
        "sums", zeroStage=stage, precision="BF16", deepspeed=raw, optimization={"microBatchSize": 1, "globalBatchSize": 18}, evaluation=None
    )
    ranks.run("sum_small_gradients", [path] * 2, arguments={"above": above})


@dataclass(frozen=True)
class Trained:
    """How each variant ended, and where its run folder is."""

    folder: Path
    ends: Outcomes

    def losses(self, name: str) -> list[float]:
        assert self.ends[name]
        return losses(self.folder / name)

    def skipped(self, name: str) -> list[dict[str, Any]]:
        assert self.ends[name]
        return [event for event in records(self.folder / name, "events") if event["kind"] == "stepSkipped"]


@pytest.fixture(scope="module")
def trained() -> list[Trained]:
    """Filled by the first test that needs it."""
    return []


SHORT = {"maxSteps": 3, "globalBatchSize": 4, "warmupSteps": "0", "weightDecay": "0"}
SKIP = {**SHORT, "nonFinite": "Skip"}
SMALL = {"evaluation": None, "checkpoint": {"everySteps": 50}}
FP16_LOSS = tolerance(LOW_PRECISION_ROUNDINGS, "FP16", terms=4 * 5)
"""Of a batch of four samples, each of which has five tokens to learn at least."""
VARIANTS: dict[str, dict[str, Any]] = {
    "reference": {"optimization": SHORT},
    "offload-2": {"optimization": {**SHORT, "offload": "CPU"}},
    "offload-3": {"optimization": {**SHORT, "offload": "CPU"}, "zeroStage": "Stage3"},
    "recompute-2": {"optimization": {**SHORT, "recompute": "All"}},
    "recompute-3": {"optimization": {**SHORT, "recompute": "All"}, "zeroStage": "Stage3"},
    "bucket-2": {"optimization": SHORT, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 1_000_000}}},
    "bucket-3": {"optimization": SHORT, "zeroStage": "Stage3", "deepspeed": {"zero_optimization": {"reduce_bucket_size": 1_000_000}}},
    "clipped": {"optimization": {**SHORT, "maxGradientNorm": "1e-12"}},
    "dropout": {"optimization": SHORT, "lora": {"dropout": "0.5"}},
    "fp16-2": {"optimization": SHORT, "precision": "FP16", "deepspeed": {"fp16": {"initial_scale_power": 30, "hysteresis": 1}}},
    "fp16-3": {"optimization": SHORT, "precision": "FP16", "zeroStage": "Stage3", "deepspeed": {"fp16": {"initial_scale_power": 4}}},
    "fixed-fp16-2": {"optimization": SHORT, "precision": "FP16", "deepspeed": {"fp16": {"loss_scale": 1 << 30}}},
    "skip-loss-2": {"optimization": SKIP},
    "skip-loss-3": {"optimization": SKIP, "zeroStage": "Stage3"},
    "skip-gradient-1": {"optimization": SKIP, "zeroStage": "Stage1", "precision": "BF16"},
    "skip-gradient-2": {"optimization": SKIP},
    "stop-gradient-2": {"optimization": SHORT, "precision": "BF16"},
}


@pytest.fixture
def variants(ranks: ForkServer, run_file: RunFile, tmp_path_factory: pytest.TempPathFactory, trained: list[Trained]) -> Trained:
    """All variants in one group of two ranks."""
    if not trained:
        folder = tmp_path_factory.mktemp("variants")
        runs = {name: {"run": str(run_file(name, folder=str(folder / name), **{**SMALL, **change}))} for name, change in VARIANTS.items()}
        for name, run in runs.items():
            if name.startswith(("skip", "stop")):
                run["poison"] = name.split("-")[1]
        trained.append(Trained(folder, ranks.run_each("train_each", 2, runs, folder / "ended.json")))
    return trained[0]


@pytest.mark.parametrize("name", ["offload-2", "offload-3", "recompute-2", "recompute-3", "bucket-2", "bucket-3"])
def test_what_changes_only_memory_or_nothing_gives_the_same_losses(variants: Trained, name: str) -> None:
    expected = variants.losses("reference")
    assert len(expected) == 3
    assert variants.losses(name) == pytest.approx(expected, rel=SAME_LOSS)
    assert variants.ends[name]["updates"] == 3


@pytest.mark.parametrize(("name", "forwards"), [("reference", 1), ("recompute-2", 2), ("recompute-3", 2)])
def test_a_layer_computes_a_second_time_only_where_activations_are_recomputed(variants: Trained, name: str, forwards: int) -> None:
    assert variants.ends[name]["layer"] == 3 * forwards


@pytest.mark.parametrize("name", ["reference", "offload-3"])
def test_the_bucket_of_gradients_has_room_for_all_that_is_trained_and_no_more(variants: Trained, name: str) -> None:
    assert variants.ends[name]["bucket"] == variants.ends[name]["trained"]
    assert variants.ends["bucket-2"]["bucket"] == 1_000_000


def test_gradients_are_clipped_before_the_update(variants: Trained) -> None:
    """To next to nothing, far below what Adam adds to their root mean square: then the model learns next to nothing."""
    reference, clipped = (variants.losses(name) for name in ("reference", "clipped"))
    assert clipped[0] == reference[0]
    assert clipped[2] != pytest.approx(reference[2], rel=10 * SAME_LOSS)


def test_dropout_changes_what_is_learned(variants: Trained) -> None:
    """Of the first step's loss nothing: an adapter begins as zeros."""
    reference, dropped = (variants.losses(name) for name in ("reference", "dropout"))
    assert dropped[0] == pytest.approx(reference[0], rel=SAME_LOSS)
    assert dropped[2] != pytest.approx(reference[2], rel=10 * SAME_LOSS)


@pytest.mark.parametrize("name", ["fp16-2", "fp16-3"])
def test_fp16_trains_and_a_step_whose_gradients_overflow_is_left_out_and_counted(variants: Trained, name: str) -> None:
    skipped = variants.skipped(name)
    assert len(skipped) == (3 if name == "fp16-2" else 0), skipped
    assert variants.ends[name]["updates"] == 3 - len(skipped)
    assert variants.ends[name]["error"] is None
    assert variants.losses(name)[0] == pytest.approx(variants.losses("reference")[0], rel=FP16_LOSS)
    assert all("overflow FP16; the loss scale is lowered to" in event["reason"] for event in skipped)


def test_an_overflow_at_a_loss_scale_that_is_fixed_ends_the_run_as_any_step_that_is_not_finite(variants: Trained) -> None:
    """It would be left out for ever."""
    error = variants.ends["fixed-fp16-2"]["error"]
    assert error.startswith(
        "NonFinite: the gradients of step 1 are not finite in FP16 at the loss scale 1073741824, which training.deepspeed"
    ), error


@pytest.mark.parametrize("name", ["skip-loss-2", "skip-loss-3", "skip-gradient-1", "skip-gradient-2"])
def test_a_step_that_is_not_finite_is_left_out_on_all_ranks_and_recorded_with_its_samples(variants: Trained, name: str) -> None:
    [event] = variants.skipped(name)
    assert event["step"] == 2
    assert len(event["samples"]) == 4
    assert all(sample.rsplit(":", 1)[1].isdigit() for sample in event["samples"])
    assert ("of step 2 is not finite on rank 1" if "loss" in name else "the gradient norm of step 2 is not finite") in event["reason"]
    assert variants.ends[name]["updates"] == 2
    assert variants.ends[name]["finite"]
    assert variants.ends[name]["error"] is None


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_applied(variants: Trained) -> None:
    end = variants.ends["stop-gradient-2"]
    assert end["error"] == "NonFinite: the gradient norm of step 2 is not finite; the step was not applied and nothing of it was saved"
    assert end["updates"] == 1
    assert end["finite"]


def test_an_evaluation_gives_the_same_loss_for_any_number_of_ranks_and_samples(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path
) -> None:
    """Fewer samples than ranks, and numbers that ranks don't divide."""
    counts = [1, 2, 5, 8]
    expected: list[float] = []
    for world_size, stage in ((1, "Stage2"), (2, "Stage2"), (3, "Stage3")):
        output = tmp_path / f"{world_size}.json"
        path = run_file(f"eval-{world_size}", zeroStage=stage)
        ranks.run("evaluate_subsets", [path] * world_size, arguments={"counts": counts, "output": str(output)})
        found = json.loads(output.read_text())
        expected = expected or found
        assert found == pytest.approx(expected, rel=SAME_LOSS)
