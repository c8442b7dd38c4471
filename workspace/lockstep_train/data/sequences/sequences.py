"""The sequences a run trains on: a plan on disk that says which tokens of which source each of them holds.

A sequence is what a cursor counts and what a global batch is made of: a document, or with packing a pack of several. The plan is
made once, like the tokens, and mapped by every rank; no token is in memory but those of the batches at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy

from lockstep_train.base.arrays import Array, Arrays, ArrayWriter
from lockstep_train.data.sequences.documents import Documents, best_fit_decreasing, offsets, reordered
from lockstep_train.data.tokens.encode import IGNORED, Example

TYPES = {"spans": "<i8", "span_offsets": "<i8", "prefixed": "|b1", "lengths": "<i8", "sequences": "<i8", "learned": "<i4"}
CONTENT = tuple(TYPES)


def write_sequences(documents: Documents, capacity: int | None, folder: Path, facts: dict[str, Any]) -> None:
    """Pack the documents into sequences of at most `capacity` tokens, or with None make each a sequence of its own."""
    if capacity is None:
        starts = numpy.arange(len(documents) + 1)
    else:
        order, starts = best_fit_decreasing(documents.lengths, capacity)
        documents = reordered(documents, order)
    writer = ArrayWriter(folder, TYPES)
    try:
        writer.append("spans", documents.spans.reshape(-1))
        writer.append("span_offsets", offsets(documents.span_counts))
        writer.append("prefixed", documents.prefixed)
        writer.append("lengths", documents.lengths)
        writer.append("sequences", starts)
        writer.append("learned", numpy.add.reduceat(documents.learned, starts[:-1]) if len(documents) else documents.learned)
        writer.commit(
            {
                **facts,
                "documents": len(documents),
                "sequences": len(starts) - 1,
                "tokens": int(documents.lengths.sum()),
                "packed": capacity is not None,
            }
        )
    except BaseException:
        writer.discard()
        raise


class Sequences(Sequence[Example]):
    """Examples that are put together from the mapped arrays when they are asked for."""

    def __init__(self, plan: Arrays, tokens: Sequence[Arrays], names: Sequence[str], prefix: tuple[int, ...]) -> None:
        self._plan = plan
        self._tokens = tokens
        self._names = names
        self._prefix = numpy.array(prefix, numpy.int64)
        self.packed = bool(plan.facts["packed"])

    def __len__(self) -> int:
        return len(self._plan["sequences"]) - 1

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, end = self._plan["sequences"][index : index + 2].tolist()
        parts = [self._document(document) for document in range(first, end)]
        return Example(
            ids=numpy.concatenate([ids for ids, _ in parts]),
            labels=numpy.concatenate([labels for _, labels in parts]),
            source=self.source(index),
            documents=tuple(len(ids) for ids, _ in parts) if self.packed else (),
        )

    def _document(self, number: int) -> tuple[Array, Array]:
        """(ids, labels). Its first token is never learned: with packing, that would be from the document before it."""
        spans = self._spans(number)
        ids = [self._tokens[source]["ids"][start : start + count] for source, start, count in spans]
        learned = [self._tokens[source]["learned"][start : start + count] for source, start, count in spans]
        if self._plan["prefixed"][number]:
            ids = [self._prefix, *ids]
            learned = [numpy.zeros(len(self._prefix), numpy.uint8), *learned]
        whole = numpy.concatenate(ids).astype(numpy.int64)
        labels = numpy.where(numpy.concatenate(learned), whole, IGNORED)
        labels[0] = IGNORED
        return whole, labels

    def _spans(self, document: int) -> list[tuple[int, int, int]]:
        first, end = self._plan["span_offsets"][document : document + 2].tolist()
        flat = self._plan["spans"][3 * first : 3 * end].reshape(-1, 3)
        return [(source, start, count) for source, start, count in flat.tolist()]

    def learned_tokens(self, indices: Sequence[int]) -> int:
        """Tokens that are predicted in these sequences, all together."""
        return int(self._plan["learned"][list(indices)].sum(dtype=numpy.int64)) if indices else 0

    def documents(self, indices: Sequence[int]) -> list[int]:
        """The lengths of all documents in these sequences."""
        bounds = self._plan["sequences"]
        return [length for index in indices for length in self._plan["lengths"][bounds[index] : bounds[index + 1]].tolist()]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Tokens of each of these sequences."""
        bounds = self._plan["sequences"]
        return [int(self._plan["lengths"][bounds[index] : bounds[index + 1]].sum()) for index in indices]

    def source(self, index: int) -> str:
        """file:line of what a sequence begins with."""
        source, start, _ = self._spans(int(self._plan["sequences"][index]))[0]
        tokens = self._tokens[source]
        sample = int(numpy.searchsorted(tokens["offsets"], start, side="right")) - 1
        return f"{self._names[source]}:{tokens['lines'][sample]}"
