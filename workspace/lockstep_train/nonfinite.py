"""Reasons why a loss or a gradient is not finite: the base model, where it is at fault, and not the learning rate."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import DistError

from lockstep_spec.choices import Method
from lockstep_train.base.errors import ConfigError, NonFinite, TrainerError
from lockstep_train.run import Run

PATIENCE_SECONDS = 10.0
"""Wait for what all ranks find, together."""


def explain_nonfinite(run: Run, step: int, error: NonFinite) -> TrainerError:
    """Error to raise instead, on every rank alike: a ConfigError where the base model is at fault, which another attempt can't mend."""
    folder = run.config.training.model.name
    fault = _first(run, _base_changed(run) or _weight_at_fault(run, step))
    if fault is not None:
        return ConfigError(f"{error}; the cause is the base model: {fault}; put the right files into {folder}, then start again")
    if step == 1:
        return NonFinite(
            f"{error}; no update was made before it, so the learning rate is not the cause: check the base model {folder}, the samples of this step and the precision"
        )
    source = run.resumed_from
    if source is not None and not source.manifest.identity.base_files:
        return NonFinite(
            f"{error}; {source.folder} has no hashes of the base model's files: check that {folder} is still what it was trained on"
        )
    return error


def _base_changed(run: Run) -> str | None:
    """Name a changed file; None where a volume's fault hides it, for the weights in memory still tell."""
    try:
        return run.base.changed()
    except TrainerError:
        return None


def _weight_at_fault(run: Run, step: int) -> str | None:
    """Name a weight of the base model that is NaN or infinite, as far as this rank has it. Of weights that are trained only the first step can tell."""
    trained = run.config.training.method is Method.FULL and step == 1
    for name, parameter in run.engine.module.named_parameters():
        values = getattr(parameter, "ds_tensor", parameter)
        if (trained or not parameter.requires_grad) and values.is_floating_point() and not bool(torch.isfinite(values).all()):
            return f"its weight {name} holds NaN or infinite values"
    return None


def _first(run: Run, fault: str | None) -> str | None:
    """First fault that any rank has, by the store, since not every rank need come here. Rank 0 keeps the store until the others have read."""
    ranks, end = run.ranks, time.monotonic() + PATIENCE_SECONDS
    _tell(run, "nonfinite", json.dumps(fault))
    faults = [json.loads(answer) for rank in range(ranks.world_size) if (answer := _heard(run, f"nonfinite/{rank}", end)) is not None]
    _tell(run, "nonfinite-read", "")
    if ranks.rank == 0:
        for rank in range(1, ranks.world_size):
            _heard(run, f"nonfinite-read/{rank}", end)
    return next((one for one in (*faults, fault) if one is not None), None)


def _tell(run: Run, what: str, text: str) -> None:
    with suppress(DistError):  # rank 0 ended meanwhile, by itself: its own error is told
        run.ranks.store.set(f"{what}/{run.ranks.rank}", text)


def _heard(run: Run, key: str, end: float) -> bytes | None:
    """Value of a key; None when that rank doesn't come here, or rank 0 has ended."""
    try:
        run.ranks.store.wait([key], timedelta(seconds=max(0.001, end - time.monotonic())))
        return bytes(run.ranks.store.get(key))
    except DistError:
        return None
