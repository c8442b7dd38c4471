"""Holdout of samples for evaluation: decided by content alone, so that growing, shuffling or resharding the data never
moves a sample between the two sides, and duplicates stay together. Whole samples are chosen, before anything is cut or packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from lockstep_train.base.arrays import Array

KEYS = 2**64


def held_out(keys: Sequence[Array], share: float) -> list[Array]:
    """Masks over the samples' `keys`, one a source. Where the share is too small for the data, the smallest key is held out."""
    threshold = numpy.uint64(min(KEYS - 1, int(share * KEYS)))
    masks = [source < threshold for source in keys]
    if not any(mask.any() for mask in masks):
        smallest = min(source.min() for source in keys if len(source))
        masks = [source == smallest for source in keys]
    return masks


def fixed_subset(keys: Sequence[Array], candidates: Sequence[Array], samples: int) -> list[Array]:
    """Choose, for each source, at most so many of its candidates that there are `samples` in all: always the same, in an order that is
    the content's. Duplicates of one sample count once."""
    chosen = numpy.concatenate([source[indices] for source, indices in zip(keys, candidates, strict=True)])
    smallest = numpy.unique(chosen)[:samples]
    subsets: list[Array] = []
    taken: Array = numpy.empty(0, numpy.uint64)
    for source, indices in zip(keys, candidates, strict=True):
        unique, first = numpy.unique(source[indices], return_index=True)
        mine = numpy.isin(unique, smallest) & ~numpy.isin(unique, taken)
        subsets.append(indices[first[mine]])
        taken = numpy.concatenate([taken, unique[mine]])
    return subsets


def part_of(keys: Array, indices: Array, share: float) -> Array:
    """Share of the samples, rounded, in their order; always the same ones, also when the data grows but for a few."""
    count = round(len(indices) * share)
    order = numpy.argsort(mix(keys[indices]), kind="stable")
    return indices[numpy.sort(order[:count])]


def mix(values: Array) -> Array:
    """A permutation of the 64-bit numbers without visible pattern (the finalizer of SplitMix64), the same on every machine."""
    with numpy.errstate(over="ignore"):
        mixed = values + numpy.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> numpy.uint64(31))
