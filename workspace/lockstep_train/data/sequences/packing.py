"""Packing of several documents into one sequence: best fit, longest first. The plan follows from the lengths alone and is the same in
every epoch, so a sequence is a unit that a cursor can count."""

from __future__ import annotations

import bisect

import numpy

from lockstep_train.base.arrays import Array


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
