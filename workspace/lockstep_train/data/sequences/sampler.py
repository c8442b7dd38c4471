"""Which samples a step trains on: a pure function of (seed, cursor), so resuming needs one number and no iterator state.

The run is one stream of samples: the permutation of epoch 0, then of epoch 1, … Step s takes the next `globalBatchSize`
of it, whatever the number of ranks; so no sample is lost or repeated when that number changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy

from lockstep_train.data.cache.arrays import Array
from lockstep_train.data.sequences.holdout import mix


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
