"""Self-test of DeepSpeed: it must keep its state where zero_access looks for it. Another version could differ without a word."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lockstep_train.zero import zero_access
from lockstep_train.zero.kinds import FULL, LITE, MASTER, WEIGHTS
from lockstep_train.zero.zero_access import UnknownDeepSpeed

BLOCK_ELEMENTS = 1 << 22
"""Elements written or compared at once: beside one parameter, gathered by DeepSpeed, the test takes 36 MB of the device, however large a
tensor is. Nothing of a step is in memory yet."""
PATTERN_PERIOD = 65_521


@torch.no_grad()
def self_test(engine: Any) -> None:
    """Write a pattern through our views, read it back through DeepSpeed's public functions, and put the values back: parameter by
    parameter.

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
    for name, parameter in zero_access.trainable(engine):
        with _patterned(owned[name].tensors[kind], owned[name].start) if name in owned else contextlib.nullcontext():
            if not _reads_pattern(parameter, kind):
                raise UnknownDeepSpeed(f"{kind} of {name} is not where this version of Lockstep expects it; install the pinned deepspeed")


@contextlib.contextmanager
def _patterned(tensor: torch.Tensor, start: int) -> Iterator[None]:
    """Put the pattern from its element `start` on in place of the values meanwhile. They wait in host memory, which has room: it will hold
    a save's copy of everything. The moments of a new engine are all zero and need none.
    """
    before = tensor.to("cpu", copy=True) if any(bool(block.any()) for _, block in _blocks(tensor)) else None
    for first, block in _blocks(tensor):
        block.copy_(_pattern(start + first, block.numel(), tensor.device))
    try:
        yield
    finally:
        if before is not None:
            tensor.copy_(before)
        else:
            tensor.zero_()


def _reads_pattern(parameter: torch.nn.Parameter, kind: str) -> bool:
    value = _public(parameter, kind)
    if value is None:
        return False
    return all(torch.equal(block, _pattern(first, block.numel(), value.device)) for first, block in _blocks(value.flatten()))


def _blocks(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Views of neighboring elements, each with the place of its first."""
    for first in range(0, flat.numel(), BLOCK_ELEMENTS):
        yield first, flat[first : first + BLOCK_ELEMENTS]


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
        if not all(torch.equal(block, master[first : first + block.numel()].to(block)) for first, block in _blocks(weights)):
            raise UnknownDeepSpeed(
                f"the weights of {fragment.name} are not where this version of Lockstep expects them; install the pinned deepspeed"
            )


def _pattern(start: int, numel: int, device: torch.device) -> torch.Tensor:
    """Element i of a parameter is i mod 65,521: exact in FP32, and no power of two that an offset could hide in. Of a block's length."""
    first = start % PATTERN_PERIOD  # a parameter may have more elements than 32 bits count
    return torch.arange(first, first + numel, dtype=torch.int32, device=device).remainder_(PATTERN_PERIOD).float()
