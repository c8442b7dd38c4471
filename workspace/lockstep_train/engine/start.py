"""From a wrapped model to a DeepSpeed engine."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import torch

from lockstep_train.config import OptimizationConfig


def prepare_deepspeed() -> Any:
    """DeepSpeed over the joined process group, without its compiled operators. Before a model is loaded.

    On CPU it would compile a shared-memory all-reduce (31 s, needs g++ and ninja), which only tensor-parallel inference
    calls: training's collectives go through the process group. So it is marked as not available; pods need no compiler.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside DeepSpeed are for its authors
        import deepspeed
        import deepspeed.ops

    import_muon_uncompiled()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    return deepspeed


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer, which `initialize` looks up and we never use, without torch's compiler.

    Its functions are decorated with torch.compile, and that decorator alone imports inductor: 2 s of every start and restart.
    """
    from deepspeed.runtime import compiler

    real = compiler.compile
    compiler.compile = lambda *arguments, **options: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = real


def start_engine(model: torch.nn.Module, optimization: OptimizationConfig, settings: dict[str, Any]) -> Any:
    """A DeepSpeed engine over the model's trainable parameters, with torch's AdamW (no operator to compile)."""
    deepspeed = prepare_deepspeed()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=optimization.learning_rate, weight_decay=optimization.weight_decay)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, optimizer=optimizer, config=settings)
    return engine
