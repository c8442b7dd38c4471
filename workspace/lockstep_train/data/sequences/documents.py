"""Documents of at most maxLength tokens, from whole samples: what is too long is cut, dropped, split or refused, and plain
text is put together. Nothing is copied: a document is a list of spans of its source's tokens.

Packing puts several documents into one sequence: best fit, longest first. The plan follows from the lengths alone and is the same in
every epoch, so a sequence is a unit that a cursor can count.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from lockstep_spec.choices import Overlong
from lockstep_train.base.arrays import Array, Arrays
from lockstep_train.base.errors import ConfigError


@dataclass(frozen=True)
class Documents:
    """Documents of one source or, put together, of several."""

    spans: Array
    """[spans, 3]: source, first token, number of tokens."""
    span_counts: Array
    """Number of spans of each document."""
    prefixed: Array
    """True where the tokens that the model expects before every text are to be put before it."""
    lengths: Array
    learned: Array
    """Tokens that are predicted."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class DocumentRules:
    """Rules by which documents are made. `source` names it in messages, `number` is its place among the run's sources."""

    source: str
    number: int
    max_length: int
    overlong: Overlong
    prefix: int
    """Tokens that the model expects before every text."""


@dataclass(frozen=True)
class MadeDocuments:
    documents: Documents
    overlong: int
    """Samples that were too long."""
    unlearned: int
    """Pieces of split samples in which nothing is learned; they are left out."""


def documents_of(tokens: Arrays, chosen: Array, rules: DocumentRules) -> MadeDocuments:
    """Make a document of each sample, in the order of `chosen`. Raises ConfigError for a sample that the rules don't allow."""
    lengths = tokens["offsets"][chosen + 1] - tokens["offsets"][chosen]
    overlong = lengths > rules.max_length
    if not overlong.any():
        return MadeDocuments(_whole(tokens, chosen, lengths, rules), 0, 0)
    if rules.overlong is Overlong.ERROR:
        first = tokens["lines"][chosen[overlong].min()]
        raise ConfigError(
            f"{int(overlong.sum())} samples are longer than training.data.maxLength = {rules.max_length} tokens, the first at "
            f"{rules.source}:{first}; raise maxLength, or set training.data.overlong to Truncate, Drop or Split"
        )
    if rules.overlong is Overlong.DROP:
        return MadeDocuments(_whole(tokens, chosen[~overlong], lengths[~overlong], rules), int(overlong.sum()), 0)
    if rules.overlong is Overlong.TRUNCATE:
        _refuse_unlearned(tokens, chosen, rules)
        return MadeDocuments(_counted(tokens, _cut(tokens, chosen, lengths, rules), rules), int(overlong.sum()), 0)
    documents = _counted(tokens, _split(tokens, chosen, lengths, rules), rules)
    learning = reordered(documents, numpy.flatnonzero(documents.learned))
    return MadeDocuments(learning, int(overlong.sum()), len(documents) - len(learning))


def _whole(tokens: Arrays, chosen: Array, lengths: Array, rules: DocumentRules) -> Documents:
    spans = numpy.stack([numpy.full(len(chosen), rules.number), tokens["offsets"][chosen], lengths], axis=1)
    ones = numpy.ones(len(chosen), numpy.int64)
    return Documents(spans, ones, numpy.zeros(len(chosen), bool), lengths, tokens["counts"][chosen])


def _refuse_unlearned(tokens: Arrays, chosen: Array, rules: DocumentRules) -> None:
    lost = tokens["first"][chosen] >= rules.max_length
    if lost.any():
        raise ConfigError(
            f"{rules.source}:{tokens['lines'][chosen[lost].min()]}: no token to learn within training.data.maxLength = {rules.max_length} "
            f"({int(lost.sum())} such samples); raise it, shorten the prompt, or set training.data.overlong to Drop or Split"
        )


def _cut(tokens: Arrays, chosen: Array, lengths: Array, rules: DocumentRules) -> tuple[Array, Array]:
    """(spans, prefixed)"""
    counts = numpy.minimum(lengths, rules.max_length)
    return numpy.stack([numpy.full(len(chosen), rules.number), tokens["offsets"][chosen], counts], axis=1), numpy.zeros(len(chosen), bool)


def _split(tokens: Arrays, chosen: Array, lengths: Array, rules: DocumentRules) -> tuple[Array, Array]:
    """(spans, prefixed): the first piece as it is, the others each with the prefix before them."""
    room = rules.max_length - rules.prefix
    pieces = 1 + numpy.maximum(0, -(-(lengths - rules.max_length) // room))
    sample = numpy.repeat(numpy.arange(len(chosen)), pieces)
    turn = numpy.arange(len(sample)) - numpy.repeat(offsets(pieces)[:-1], pieces)
    begin = numpy.where(turn == 0, 0, rules.max_length + (turn - 1) * room)
    count = numpy.minimum(lengths[sample] - begin, numpy.where(turn == 0, rules.max_length, room))
    return numpy.stack([numpy.full(len(sample), rules.number), tokens["offsets"][chosen][sample] + begin, count], axis=1), turn > 0


def _counted(tokens: Arrays, cut: tuple[Array, Array], rules: DocumentRules) -> Documents:
    """Documents of one span each, with what is learned of them."""
    spans, prefixed = cut
    with_prefix = prefixed & (rules.prefix > 0)
    learned = numpy.array(
        [
            int(numpy.count_nonzero(tokens["learned"][start + (not prefix) : start + count]))
            for (_, start, count), prefix in zip(spans.tolist(), with_prefix.tolist(), strict=True)
        ],
        numpy.int32,
    )
    return Documents(spans, numpy.ones(len(spans), numpy.int64), with_prefix, spans[:, 2] + rules.prefix * with_prefix, learned)


def blocks_of(tokens: Arrays, chosen: Array, rules: DocumentRules) -> MadeDocuments:
    """Make documents of plain text: neighboring paragraphs joined up to maxLength tokens; a longer one is continued in the next block, so
    that nothing is lost.
    """
    tail = int(tokens.facts["separator"])
    every = list(_blocks(tokens["offsets"], chosen, tail, rules.max_length - rules.prefix))
    prefix = rules.prefix
    blocks = [block for block in every if sum(count for _, count in block) - (prefix == 0) > 0]
    lengths = numpy.array([sum(count for _, count in block) + prefix for block in blocks], numpy.int64)
    spans = numpy.array([(rules.number, start, count) for block in blocks for start, count in block], numpy.int64).reshape(-1, 3)
    counts = numpy.array([len(block) for block in blocks], numpy.int64)
    prefixed = numpy.full(len(blocks), prefix > 0)
    return MadeDocuments(Documents(spans, counts, prefixed, lengths, (lengths - max(1, prefix)).astype(numpy.int32)), 0, 0)


def _blocks(starts: Array, chosen: Array, tail: int, room: int) -> Iterator[list[tuple[int, int]]]:
    """Spans (first token, number of tokens) of each block; its last paragraph loses the break after it."""
    block: list[tuple[int, int]] = []
    used = 0
    for start, end in zip(starts[chosen].tolist(), starts[chosen + 1].tolist(), strict=True):
        begin = start
        if block and used + end - tail - begin > room:
            yield _without_tail(block, tail)
            block, used = [], 0
        while used + end - tail - begin > room:
            yield [(begin, room)]
            begin += room
        _extend(block, begin, end - begin)
        used += end - begin
    if block:
        yield _without_tail(block, tail)


def _extend(block: list[tuple[int, int]], start: int, count: int) -> None:
    if block and sum(block[-1]) == start:
        block[-1] = (block[-1][0], block[-1][1] + count)
    else:
        block.append((start, count))


def _without_tail(block: list[tuple[int, int]], tail: int) -> list[tuple[int, int]]:
    start, count = block[-1]
    return [*block[:-1], (start, count - tail)]


def joined_documents(parts: Sequence[Documents]) -> Documents:
    names = ("spans", "span_counts", "prefixed", "lengths", "learned")
    return Documents(*(numpy.concatenate([getattr(part, name) for part in parts]) for name in names))


def reordered(documents: Documents, order: Array) -> Documents:
    """The documents in another order, or some of them."""
    starts = offsets(documents.span_counts)[:-1]
    counts = documents.span_counts[order]
    within = numpy.arange(int(counts.sum())) - numpy.repeat(offsets(counts)[:-1], counts)
    return Documents(
        documents.spans[numpy.repeat(starts[order], counts) + within],
        counts,
        documents.prefixed[order],
        documents.lengths[order],
        documents.learned[order],
    )


def best_fit_decreasing(lengths: Array, capacity: int) -> tuple[Array, Array]:
    """Pack documents: (documents in the order of their sequences, offsets of the sequences into them). Every length is at most `capacity`.

    Each document goes to the sequence with the least room that still holds it; documents of one length keep their order.
    """
    order = numpy.argsort(-lengths, kind="stable")
    bins = numpy.empty(len(lengths), numpy.int64)
    rooms: list[int] = []  # the distinct rooms left, ascending
    open_bins: dict[int, list[int]] = {}  # room → sequences with it
    count = 0
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            chosen, room = count, capacity
            count += 1
        else:
            room = rooms[place]
            waiting = open_bins[room]
            chosen = waiting.pop()
            if not waiting:
                del rooms[place], open_bins[room]
        bins[document] = chosen
        left = room - length
        if left > 0:
            if left not in open_bins:
                open_bins[left] = []
                bisect.insort(rooms, left)
            open_bins[left].append(chosen)
    return numpy.argsort(bins, kind="stable"), offsets(numpy.bincount(bins, minlength=count))


def offsets(counts: Array) -> Array:
    """Offset at which each of these runs begins, and at which the last one ends."""
    return numpy.concatenate([numpy.zeros(1, numpy.int64), numpy.cumsum(counts, dtype=numpy.int64)])
