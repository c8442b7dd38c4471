"""Whether this DeepSpeed keeps its state where zero_access looks for it. Another version could differ without a word."""

from __future__ import annotations

from typing import Any

import torch

from lockstep_train.checkpoint import zero_access
from lockstep_train.checkpoint.kinds import FULL, LITE, MASTER, WEIGHTS
from lockstep_train.checkpoint.zero_access import UnknownDeepSpeed


@torch.no_grad()
def self_test(engine: Any) -> None:
    """Write a pattern through our views, read it back through DeepSpeed's public functions, and put the values back.

    A collective. Raises UnknownDeepSpeed when they disagree, or when something that we read is not there.
    """
    try:
        for kind in FULL:
            _check(engine, kind)
        _check_weights(engine)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise UnknownDeepSpeed(
            f"DeepSpeed lacks what Lockstep reads ({type(error).__name__}: {error}); install the pinned deepspeed"
        ) from error


def _check(engine: Any, kind: str) -> None:
    owned = {fragment.name: fragment for fragment in zero_access.fragments(engine)}
    before = {name: fragment.tensors[kind].clone() for name, fragment in owned.items()}
    for fragment in owned.values():
        fragment.tensors[kind].copy_(_pattern(fragment.start, fragment.numel, fragment.tensors[kind].device))
    try:
        for name, parameter in zero_access.trainable(engine):
            value = _public(parameter, kind)
            if value is None or not torch.equal(value.flatten(), _pattern(0, value.numel(), value.device)):
                raise UnknownDeepSpeed(f"{kind} of {name} is not where this version of Lockstep expects it; install the pinned deepspeed")
    finally:
        for name, value in before.items():
            owned[name].tensors[kind].copy_(value)


def _public(parameter: torch.nn.Parameter, kind: str) -> torch.Tensor | None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    value: torch.Tensor | None = safe_get_full_fp32_param(parameter) if kind == MASTER else safe_get_full_optimizer_state(parameter, kind)
    return value


def _check_weights(engine: Any) -> None:
    """The weights in the run's precision are the masters, rounded, where both are this rank's."""
    masters = {fragment.name: fragment for fragment in zero_access.fragments(engine)}
    for fragment in zero_access.fragments(engine, LITE):
        other = masters.get(fragment.name)
        if other is None:
            continue
        start, end = max(fragment.start, other.start), min(fragment.start + fragment.numel, other.start + other.numel)
        if start >= end:
            continue
        weights = fragment.tensors[WEIGHTS][start - fragment.start : end - fragment.start]
        master = other.tensors[MASTER][start - other.start : end - other.start]
        if not torch.equal(weights, master.to(weights)):
            raise UnknownDeepSpeed(
                f"the weights of {fragment.name} are not where this version of Lockstep expects them; install the pinned deepspeed"
            )


def _pattern(start: int, numel: int, device: torch.device) -> torch.Tensor:
    """Element i of a parameter is i mod 65,521: exact in FP32, and no power of two that an offset could hide in."""
    return (torch.arange(start, start + numel, device=device) % 65_521).float()
