"""Batches of a step: which sequences they are, and their tensors.

Which sequences follows from (seed, cursor) alone, so resuming needs one number and no iterator state. The run is one stream of samples: the
permutation of epoch 0, then of epoch 1, … Step s takes the next `globalBatchSize` of it, whatever the number of ranks; so no sample is lost
or repeated when that number changes.

Nothing is masked by an attention_mask: what keeps documents apart are their positions.

A row is padded on its right. Attention is causal, so no real token sees the padding, and nothing is learned there; without a
mask, an unpacked micro-batch takes attention's fast path. In a packed row the positions start again at 0 with every document and
once more with the padding, which makes the padding a document of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch

from lockstep_spec.shares import Split
from lockstep_train.base.arrays import Array
from lockstep_train.data.sequences.divide import mix
from lockstep_train.data.tokens.encode import IGNORED, Example


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


def rank_micro_batches(batch: Sequence[int], rank: int, split: Split) -> list[list[int]]:
    """Micro-batches of this rank of a global batch: one a turn, the last ones possibly short or empty.

    An empty one is a ghost: the rank computes with zero weight, so that every rank runs the same collectives.
    """
    all_ranks, before, mine = sum(split.sizes), sum(split.sizes[:rank]), split.sizes[rank]
    starts = [turn * all_ranks + before for turn in range(split.turns)]
    return [list(batch[start : start + mine]) for start in starts]


@dataclass(frozen=True)
class Batch:
    """Tensors of shape [batch, sequence]."""

    ids: torch.Tensor
    labels: torch.Tensor
    real: torch.Tensor
    """False on padding."""
    documents: DocumentBounds | None = None
    """Bounds of documents, set for packed rows."""

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of the model's forward pass. No cache: with one, transformers doesn't look for documents in the positions."""
        apart = self.documents.arguments if self.documents is not None else {}
        return {"input_ids": self.ids, "use_cache": False, **apart}


@dataclass(frozen=True)
class DocumentBounds:
    """Bounds of the documents of packed rows, given in both ways that attention understands."""

    positions: torch.Tensor
    """[batch, sequence]. Eager attention, SDPA and flex attention derive a block mask from it, row by row."""
    boundaries: torch.Tensor
    """[documents + 1], int32, over all rows one after the other. Flash attention would derive it from the positions of a single
    row, but in a batch of several it would let every document see the ones before it."""
    longest: int

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "position_ids": self.positions,
            "cu_seq_lens_q": self.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def collate(examples: Sequence[Example], ghost: Example, pad: int, device: torch.device) -> Batch:
    """A micro-batch; an empty one becomes a ghost: a real example in which nothing is learned."""
    rows = list(examples) or [ghost.unlearned()]
    shape = (len(rows), max(len(row.ids) for row in rows))
    ids = numpy.full(shape, pad, numpy.int64)
    labels = numpy.full(shape, IGNORED, numpy.int64)
    real = numpy.zeros(shape, bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = row.ids
        labels[number, : len(row.ids)] = row.labels
        real[number, : len(row.ids)] = True
    documents = keep_apart([row.documents for row in rows], shape[1], device) if rows[0].packed else None
    return Batch(torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device), torch.from_numpy(real).to(device), documents)


def keep_apart(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> DocumentBounds:
    """Bounds that keep documents apart. `rows`: the lengths of each row's documents."""
    filled = [[*lengths, width - sum(lengths)] if sum(lengths) < width else list(lengths) for lengths in rows]
    positions = numpy.stack([numpy.concatenate([numpy.arange(length) for length in lengths]) for lengths in filled])
    flat = [length for lengths in filled for length in lengths]
    boundaries = numpy.concatenate([[0], numpy.cumsum(flat)]).astype(numpy.int32)
    return DocumentBounds(torch.from_numpy(positions).to(device), torch.from_numpy(boundaries).to(device), max(flat))
