"""DeepSpeed's configuration: ours, and raw settings laid over it."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_train.config import TrainingConfig
from lockstep_train.engine.settings import deepspeed_settings
from lockstep_train.errors import ConfigError
from lockstep_train.runfile import parse_training


def training(optimization: dict[str, Any] | None = None, **change: Any) -> TrainingConfig:
    settings = {
        "model": {"name": "/models/tiny"},
        "lora": {"rank": 4, "alpha": 8, "dropout": "0", "targetModules": ["q_proj"]},
        "zeroStage": "Stage3",
        "precision": "BF16",
        "seed": 1,
        "data": {"path": "/data.jsonl", "maxLength": 64},
        "optimization": {"epochs": 1, "learningRate": "1e-4", "microBatchSize": 2, **(optimization or {})},
        "evaluation": None,
        "checkpoint": {"everySteps": 2, "keep": 2, "resumeFrom": "Auto"},
    }
    return parse_training({**settings, **change})


def test_raw_settings_are_laid_over_ours_section_by_section() -> None:
    settings = deepspeed_settings(
        training(deepspeed={"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000}, "wall_clock_breakdown": True}), 3
    )
    assert settings["zero_optimization"]["overlap_comm"] is True
    assert settings["zero_optimization"]["reduce_bucket_size"] == 1000
    assert settings["zero_optimization"]["stage"] == 3
    assert settings["wall_clock_breakdown"] is True
    assert settings["gradient_accumulation_steps"] == 3


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"train_batch_size": 8}, "training.deepspeed.train_batch_size contradicts training.optimization.globalBatchSize"),
        ({"train_micro_batch_size_per_gpu": 8}, "contradicts training.optimization.microBatchSize"),
        ({"gradient_accumulation_steps": 2}, "contradicts training.optimization.globalBatchSize"),
        ({"gradient_clipping": 2}, "contradicts training.optimization.maxGradientNorm"),
        ({"optimizer": {"type": "Adam"}}, "contradicts training.optimization.optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "contradicts training.optimization.schedule"),
        ({"bf16": {"enabled": False}}, "training.deepspeed.bf16 contradicts training.precision"),
        ({"fp16": {"enabled": True}}, "training.deepspeed.fp16.enabled contradicts training.precision"),
        ({"zero_optimization": {"stage": 2}}, "training.deepspeed.zero_optimization.stage contradicts training.zeroStage"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "contradicts training.optimization.offload"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "contradicts training.hierarchicalPartition"),
        ({"fp16": {"initial_scale_power": 8}}, "is only read with training.precision FP16, which is BF16"),
        ({"wall_clock_brakedown": True}, "no setting of DeepSpeed that can be used here (did you mean wall_clock_breakdown?)"),
        (
            {"curriculum_learning": {"enabled": True}},
            "training.deepspeed.curriculum_learning is no setting of DeepSpeed that can be used here",
        ),
    ],
)
def test_a_raw_setting_that_contradicts_ours_or_would_be_ignored_is_refused_by_name(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        deepspeed_settings(training(deepspeed=raw), 1)
    assert said in str(refused.value)


def test_in_fp16_the_loss_scaler_can_be_set_raw() -> None:
    settings = deepspeed_settings(training(precision="FP16", deepspeed={"fp16": {"initial_scale_power": 8}}), 1)
    assert settings["fp16"] == {"enabled": True, "initial_scale_power": 8}
    assert settings["bf16"]["enabled"] is False


def test_offload_puts_the_optimizer_on_the_cpu_without_deepspeeds_compiled_one() -> None:
    settings = deepspeed_settings(training({"offload": "CPU"}), 1)
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert settings["zero_force_ds_cpu_optimizer"] is False
    assert "offload_optimizer" not in deepspeed_settings(training(), 1)["zero_optimization"]


def test_gradients_are_clipped_to_the_norm_that_is_asked_for() -> None:
    assert deepspeed_settings(training({"maxGradientNorm": "0.25"}), 1)["gradient_clipping"] == 0.25


def test_gradients_are_looked_at_before_they_are_applied_in_bf16_too() -> None:
    assert deepspeed_settings(training(), 1)["bf16"] == {"enabled": True, "check_grad_overflow": True}
