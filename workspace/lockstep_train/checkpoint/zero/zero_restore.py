"""Restoring of a commit's state into a DeepSpeed engine: masters, moments, the weights that compute, counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep_train.checkpoint.format.kinds import MASTER
from lockstep_train.checkpoint.format.shards import RangeNeed, Values
from lockstep_train.checkpoint.zero.zero_access import (
    Fragment,
    _stage3_range,
    _stage3_tensor,
    fragments,
    is_stage3,
    set_optimizer_step,
    trainable,
)


def needs(engine: Any) -> dict[str, RangeNeed]:
    """Ranges of each parameter that this rank needs to restore it."""
    owned = {fragment.name: fragment for fragment in fragments(engine, kinds=(MASTER,))}
    return {name: _need(owned.get(name), whole=parameter.numel() > 0) for name, parameter in trainable(engine)}


def _need(fragment: Fragment | None, whole: bool) -> RangeNeed:
    """`whole`: the parameter is resident, as under Stage1 and Stage2, and under Stage3 where it is small."""
    return RangeNeed(fragment.start, fragment.numel, whole) if fragment is not None else RangeNeed(0, 0, whole)


@torch.no_grad()
def restore(engine: Any, fetch: Callable[[str, RangeNeed], Values], optimizer_step: int) -> None:
    """Load the state. `fetch` is called on every rank for every parameter in the same order, so it may be a collective.

    Moments that it doesn't give are zero, as before the first update.
    """
    set_optimizer_step(engine, optimizer_step)
    owned = {fragment.name: fragment for fragment in fragments(engine)}
    ranges = needs(engine)
    for name, parameter in trainable(engine):
        need = ranges[name]
        values = fetch(name, need)
        if name in owned:
            _copy_fragment(owned[name], values, need)
        _set_weights(engine.optimizer, parameter, values[MASTER], need)
    if hasattr(engine.optimizer, "invalidate_secondary_tensor"):
        engine.optimizer.invalidate_secondary_tensor()  # else the first forward uses the weights from before the load


def set_counters(engine: Any, step: int, accumulation: int, global_batch_size: int) -> None:
    engine.global_steps = step
    engine.global_samples = step * global_batch_size
    engine.micro_steps = step * accumulation


def _own(master: torch.Tensor, need: RangeNeed) -> torch.Tensor:
    return master[need.start : need.start + need.numel] if need.whole else master


def _copy_fragment(fragment: Fragment, values: Values, need: RangeNeed) -> None:
    for kind, tensor in fragment.tensors.items():
        if kind in values:
            tensor.copy_(_own(values[kind], need) if kind == MASTER else values[kind])


def _set_weights(optimizer: Any, parameter: Any, master: torch.Tensor, need: RangeNeed) -> None:
    """The low-precision copy that the forward pass uses; under Stage3 the shard, and the whole one if it stays resident."""
    if is_stage3(parameter):
        _, numel = _stage3_range(optimizer, parameter)
        _stage3_tensor(optimizer, parameter, MASTER)[numel:].zero_()
        parameter.ds_tensor[:numel].copy_(_own(master, need))
        parameter.ds_tensor[numel:].zero_()
    if need.whole:
        parameter.data.copy_(master.view(parameter.shape))
