"""The base model, its adapter and the DeepSpeed engine over both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep_spec import length
from lockstep_spec.choices import ZeroStage
from lockstep_spec.shape import ModelShape
from lockstep_train.base.config import TrainingConfig
from lockstep_train.base.imports import import_method
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.zero.self_test import self_test
from lockstep_train.data.tokens.attention import choose_attention
from lockstep_train.engine.balance import find_balance
from lockstep_train.engine.loss import TokenLoss, tile_head
from lockstep_train.engine.secondary import check_secondary_shards
from lockstep_train.engine.settings import deepspeed_settings
from lockstep_train.engine.start import precision_note, prepare_deepspeed, recompute_activations, refuse_invalid, share_cores, start_engine
from lockstep_train.model.load import load_base
from lockstep_train.model.quantize import check_quantization
from lockstep_train.model.sharded_save import save_sharded
from lockstep_train.model.trained import describe_trained, make_trainable
from lockstep_train.report import Reporter


def start_model(
    training: TrainingConfig,
    folder: Path,
    plan: length.Plan,
    ranks: Ranks,
    reporter: Reporter,
    partition: int = 1,
    shape: ModelShape | None = None,
) -> tuple[Any, TokenLoss, dict[str, Any]]:
    """The engine, tested to keep its state where we look for it, its loss, and what a manifest says of what is trained."""
    check_quantization(training)
    slow = precision_note(training.precision, ranks.device)
    if slow is not None:
        reporter.say(slow)
    settings = deepspeed_settings(training, plan.accumulation, partition, shape)
    prepare_deepspeed()
    import_method(training)
    reporter.startup.done("imports")
    refuse_invalid(settings)
    share_cores(training.optimization, ranks.local_world_size)
    base = load_base(folder, training.precision, settings, ranks.device, reporter.say, training.model.quantization)
    choose_attention(base, training, ranks.device, reporter.say)
    reporter.startup.done("load")
    if training.optimization.gradient_checkpointing:
        recompute_activations(base)
    elif training.zero_stage is ZeroStage.STAGE3:
        save_sharded(base)
    model = make_trainable(base, training, fresh=plan.done.steps == 0)
    trained = describe_trained(model, training)
    head, note = tile_head(model)
    balance, warning = find_balance(model)
    engine = start_engine(model, training.optimization, settings)
    engine.train()  # transformers hands out models for evaluation: without dropout or gradient checkpointing
    reporter.startup.done("engine")
    self_test(engine)
    if partition > 1:
        check_secondary_shards(engine.module)
    reporter.startup.done("selfTest")
    if note is not None:
        reporter.say(f"The loss is computed from whole logits, which takes more memory: of this model, {note}")
    if warning is not None:
        reporter.say(warning)
    return engine, TokenLoss(engine, head, balance), trained
