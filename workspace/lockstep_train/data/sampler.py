"""Which samples a step trains on: a pure function of (seed, cursor), so resuming needs one number and no iterator state.

The run is one stream of samples: the permutation of epoch 0, then of epoch 1, … Step s takes the next `globalBatchSize`
of it, whatever the number of ranks; so no sample is lost or repeated when that number changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy

from lockstep_train.data.arrays import Array
from lockstep_train.data.holdout import mix


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> Array:
    """The permutation of range(count) for one epoch: sorted by a hash of our own, since a library's shuffle may change with it."""
    start = int.from_bytes(hashlib.sha256(f"lockstep-order:{seed}:{epoch}".encode()).digest()[:8], "big")
    with numpy.errstate(over="ignore"):
        numbers = numpy.arange(count, dtype=numpy.uint64) + numpy.uint64(start)
    return numpy.argsort(mix(numbers), kind="stable")


def global_batch(count: int, seed: int, cursor: int, size: int, end: int) -> list[int]:
    """Indices of the next samples at `cursor` (samples consumed so far): `size` of them, fewer at the `end` of the run."""
    return [int(epoch_order(count, seed, position // count)[position % count]) for position in range(cursor, min(cursor + size, end))]


def rank_micro_batches(batch: Sequence[int], rank: int, world_size: int, micro: int, accumulation: int) -> list[list[int]]:
    """This rank's micro-batches of a global batch: `accumulation` of them, the last ones possibly short or empty.

    An empty one is a ghost: the rank computes with zero weight, so that every rank runs the same collectives.
    """
    starts = [(turn * world_size + rank) * micro for turn in range(accumulation)]
    return [list(batch[start : start + micro]) for start in starts]


@dataclass(frozen=True)
class Done:
    """How far the run was when this attempt began."""

    steps: int = 0
    samples: int = 0
    """Not always steps × globalBatchSize: the last step of a run that is now made longer may have been a short one."""


@dataclass(frozen=True)
class Plan:
    """The length of the run and of a step."""

    global_batch_size: int
    accumulation: int
    """Micro-batches a rank computes for one optimizer step."""
    total_samples: int
    total_steps: int
    done: Done

    def cursor(self, step: int) -> int:
        """Samples consumed before `step` (from 1)."""
        return min(self.total_samples, self.done.samples + (step - 1 - self.done.steps) * self.global_batch_size)


def plan(
    *, count: int, epochs: int, max_steps: int | None, global_batch_size: int, world_size: int, micro: int, done: Done = Done()
) -> Plan:
    """`count` is the number of training examples. Any rank count is legal: what is missing is filled with ghosts."""
    total_samples = count * epochs
    if max_steps is not None:
        total_samples = min(total_samples, done.samples + max(0, max_steps - done.steps) * global_batch_size)
    return Plan(
        global_batch_size=global_batch_size,
        accumulation=-(-global_batch_size // (micro * world_size)),
        total_samples=total_samples,
        total_steps=done.steps + max(0, -(-(total_samples - done.samples) // global_batch_size)),
        done=done,
    )
