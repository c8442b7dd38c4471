"""What a run's sizes follow from, of its whole configuration."""

from __future__ import annotations

from lockstep_spec.settings import Adapter, Settings, parameter_place, stated_bucket, stated_live, stated_overlap, summed_bytes
from lockstep_train.base.config import TrainingConfig


def settings_of(training: TrainingConfig, *, flash_attention: bool = True) -> Settings:
    """`flash_attention`: there is one that keeps packed documents apart."""
    lora, optimization = training.lora, training.optimization
    return Settings(
        max_length=training.data.max_length,
        micro_batch_size=optimization.micro_batch_size,
        adapter=Adapter(lora.rank, lora.target_modules, lora.target_parameters, lora.modules_to_save, lora.dora),
        zero_stage=training.zero_stage,
        precision=training.precision,
        method=training.method,
        quantization=training.model.quantization,
        offload=optimization.offload,
        gradient_checkpointing=optimization.gradient_checkpointing,
        hierarchical_partition=training.hierarchical_partition,
        content=training.checkpoint.content,
        gradient_bytes=summed_bytes(training.deepspeed),
        live_elements=stated_live(training.deepspeed),
        bucket_elements=stated_bucket(training.deepspeed),
        overlap=stated_overlap(training.deepspeed),
        parameters=parameter_place(training.deepspeed),
        packing=training.data.packing,
        flash_attention=flash_attention,
    )
