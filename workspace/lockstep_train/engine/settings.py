"""DeepSpeed's configuration from ours (pure)."""

from __future__ import annotations

from typing import Any

from lockstep_train.config import Precision, TrainingConfig


def deepspeed_settings(training: TrainingConfig, accumulation: int, partition: int = 1) -> dict[str, Any]:
    """Only what we decide; the learning rate is set by us before every step, so DeepSpeed gets no scheduler.

    `partition`: ranks that share a second copy of the weights (hpZ); 1: there is none.
    """
    return {
        "train_micro_batch_size_per_gpu": training.optimization.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": training.optimization.max_gradient_norm,
        "bf16": {"enabled": training.precision is Precision.BF16},
        "zero_optimization": {
            "stage": training.zero_stage.number,
            "zero_hpz_partition_size": partition,
            "overlap_comm": False,  # gains nothing for an adapter's few gradients, and has reduced wrong values before
            "contiguous_gradients": True,
            "stage3_gather_16bit_weights_on_model_save": False,  # the gather is the 30-minute time-out people know
        },
        "steps_per_print": 1_000_000_000,
    }
