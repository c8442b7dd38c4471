"""Division of samples into those that are trained on, how often, and those that are evaluated; and notes on those that are too long.

The holdout is decided by content alone, so that growing, shuffling or resharding the data never moves a sample between the two sides, and
duplicates stay together. Whole samples are chosen, before anything is cut or packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from lockstep_spec.choices import Overlong
from lockstep_spec.training import EvaluationConfig
from lockstep_train.base.arrays import Array, Arrays
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.read.files import DataSource
from lockstep_train.data.sequences.documents import DocumentRules, Documents, MadeDocuments, blocks_of, documents_of, joined_documents

DONE = {Overlong.TRUNCATE: "cut at their end", Overlong.DROP: "dropped", Overlong.SPLIT: "split"}


@dataclass(frozen=True)
class DivisionRule:
    max_length: int
    overlong: Overlong
    packing: bool
    prefix: int
    """Tokens that the model expects before every text."""
    evaluation: EvaluationConfig | None

    @property
    def own_file(self) -> bool:
        """The last source is the evaluation's own."""
        return self.evaluation is not None and self.evaluation.data is not None


@dataclass(frozen=True)
class Divided:
    training: Documents
    evaluation: Documents
    notes: list[str]


@dataclass(frozen=True)
class Sides:
    """Indices of the samples of each source."""

    training: list[Array]
    evaluation: list[Array]


def divide(sources: Sequence[DataSource], tokens: Sequence[Arrays], rule: DivisionRule) -> Divided:
    """Divide the samples. Raises ConfigError when nothing is left to train on, or a sample is too long and `overlong` says Error."""
    sides = choose_sides([arrays["keys"] for arrays in tokens], rule)
    outcomes: list[MadeDocuments] = []
    notes: list[str] = []
    for number, source in enumerate(sources[: len(sources) - rule.own_file]):
        indices = repeated_by_weight(tokens[number]["keys"], sides.training[number], source.weight)
        outcomes.append(_documents(source, tokens[number], number, indices, rule))
        notes.append(_note(source, len(sides.training[number]), len(indices), outcomes[-1], rule))
    training = joined_documents([part.documents for part in outcomes])
    if not len(training):
        raise ConfigError("training.data leaves no sample to train on; add samples, or lower training.evaluation.holdout")
    evaluated = [
        _documents(source, tokens[number], number, numpy.sort(indices) if source.plain_text else indices, rule)
        for number, (source, indices) in enumerate(zip(sources, sides.evaluation, strict=True))
    ]
    notes += _evaluation_notes(tokens, sides, evaluated, rule)
    return Divided(training, joined_documents([part.documents for part in evaluated]), notes)


def choose_sides(keys: Sequence[Array], rule: DivisionRule) -> Sides:
    everything = [numpy.arange(len(source)) for source in keys]
    none = [indices[:0] for indices in everything]
    if rule.evaluation is None:
        return Sides(everything, none)
    if rule.own_file:
        return Sides([*everything[:-1], none[-1]], fixed_subset(keys, [*none[:-1], everything[-1]], rule.evaluation.samples))
    masks = held_out(keys, rule.evaluation.holdout)
    candidates = [numpy.flatnonzero(mask) for mask in masks]
    return Sides([numpy.flatnonzero(~mask) for mask in masks], fixed_subset(keys, candidates, rule.evaluation.samples))


def repeated_by_weight(keys: Array, indices: Array, weight: float) -> Array:
    """Repeat every sample as often as the weight says; of a fraction, the samples that their content chooses."""
    whole = int(weight)
    return numpy.concatenate([*[indices] * whole, part_of(keys, indices, weight - whole)])


def _documents(source: DataSource, tokens: Arrays, number: int, indices: Array, rule: DivisionRule) -> MadeDocuments:
    rules = DocumentRules(source.name, number, rule.max_length, rule.overlong, rule.prefix)
    if not source.plain_text:
        return documents_of(tokens, indices, rules)
    passes = numpy.split(indices, numpy.flatnonzero(numpy.diff(indices) <= 0) + 1)  # the source begins anew with each time it is seen
    outcomes = [blocks_of(tokens, run, rules) for run in passes]
    return MadeDocuments(joined_documents([part.documents for part in outcomes]), 0, 0)


def _note(source: DataSource, samples: int, passes: int, outcome: MadeDocuments, rule: DivisionRule) -> str:
    parts = [f"{samples:,} samples to train on"]
    if source.weight != 1:
        parts.append(f"weight {source.weight:g}: {passes:,} an epoch")
    return f"Data: {source.name}: {', '.join([*parts, *_what_was_made(passes, [outcome], rule)])}"


def _what_was_made(samples: int, outcomes: Sequence[MadeDocuments], rule: DivisionRule) -> Iterator[str]:
    """Count the documents that so many samples became, and say what was done to those that are too long."""
    documents, overlong, unlearned = (
        sum(counts) for counts in zip(*((len(part.documents), part.overlong, part.unlearned) for part in outcomes), strict=True)
    )
    if documents != samples:
        yield f"{documents:,} documents"
    if overlong:
        yield f"{overlong:,} longer than maxLength = {rule.max_length} tokens, {DONE[rule.overlong]}"
    if unlearned:
        yield f"{unlearned:,} pieces left out in which nothing is learned"


def _evaluation_notes(tokens: Sequence[Arrays], sides: Sides, outcomes: Sequence[MadeDocuments], rule: DivisionRule) -> list[str]:
    """Note how many are evaluated and what became of them, and of a file of its own how many of them are trained on as well."""
    if rule.evaluation is None:
        return []
    chosen = sum(map(len, sides.evaluation))
    notes = [f"Evaluation: {', '.join([f'{chosen:,} samples', *_what_was_made(chosen, outcomes, rule)])}"]
    if rule.own_file:
        trained = numpy.concatenate([arrays["keys"] for arrays in tokens[:-1]])
        both = int(numpy.isin(tokens[-1]["keys"][sides.evaluation[-1]], trained).sum())
        if both:
            notes.append(
                f"{both:,} of the {chosen:,} samples for evaluation are trained on as well, so their loss tells less than it seems"
            )
    return notes


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
