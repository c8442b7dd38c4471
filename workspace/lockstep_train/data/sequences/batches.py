"""Batches of a step: which sequences they are, and their tensors.

Which sequences follows from (seed, cursor) alone, so resuming needs one number and no iterator state. The run is one stream of samples: the
permutation of epoch 0, then of epoch 1, … Step s takes the next `globalBatchSize` of it, whatever the number of ranks; so no sample is lost
or repeated when that number changes.

A micro-batch is one joined row: its sequences one after the other, without padding. Nothing is masked by an attention_mask: what keeps
documents apart are their bounds and positions, which start again at 0 with every document.

Evaluation, and training by rows, pad rows on their right. Attention is causal, so no real token sees the padding, and nothing is learned
there; without a mask, an unpacked micro-batch takes attention's fast path. In a packed row the padding is a document of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch

from lockstep_spec.choices import Batches
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


@dataclass(frozen=True)
class Batch:
    """Tensors of shape [batch, sequence]."""

    ids: torch.Tensor
    labels: torch.Tensor
    real: torch.Tensor
    """False on padding."""
    documents: DocumentBounds | None = None
    """Bounds of documents, set for joined and packed rows."""

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of the model's forward pass. No cache: with one, transformers doesn't look for documents in the positions."""
        apart = self.documents.arguments if self.documents is not None else {}
        return {"input_ids": self.ids, "use_cache": False, **apart}


@dataclass(frozen=True)
class DocumentBounds:
    """Bounds of the documents of joined and packed rows, given in every way that attention understands."""

    lengths: tuple[int, ...]
    """Lengths over all rows one after the other, for attention that computes each document by itself."""
    positions: torch.Tensor
    """[batch, sequence]. Eager attention, SDPA and flex attention derive a block mask from it, row by row."""
    boundaries: torch.Tensor
    """[documents + 1], int32, over all rows one after the other. Flash attention would derive it from the positions of a single
    row, but in a batch of several it would let every document see the ones before it."""

    @property
    def arguments(self) -> dict[str, Any]:
        longest = max(self.lengths)
        return {
            "document_lengths": self.lengths,
            "position_ids": self.positions,
            "cu_seq_lens_q": self.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def joined(examples: Sequence[Example]) -> Example:
    """Join all documents of the examples in one row. What is learned stays, since the first token of a document never is."""
    return Example(
        ids=numpy.concatenate([example.ids for example in examples]),
        labels=numpy.concatenate([example.labels for example in examples]),
        source=examples[0].source,
        documents=tuple(length for example in examples for length in example.documents or (len(example.ids),)),
    )


def collate(examples: Sequence[Example], ghost: Example, pad: int, device: torch.device, batches: Batches = Batches.ROWS) -> Batch:
    """Make a micro-batch; an empty one becomes a ghost, a real example in which nothing is learned, so that every rank runs the same
    collectives.
    """
    rows = list(examples) or [ghost.unlearned()]
    if batches is Batches.TOKENS:
        rows = [joined(rows)]
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
    lengths = tuple(flat)
    return DocumentBounds(lengths, torch.from_numpy(positions).to(device), bounds_of(lengths, device))


@lru_cache(maxsize=4)
def bounds_of(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the bounds of documents: [documents + 1], int32, over all rows one after the other."""
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)
