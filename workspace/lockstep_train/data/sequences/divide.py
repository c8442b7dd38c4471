"""Division of samples into those that are trained on, how often, and those that are evaluated; and notes on those that are too long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from lockstep_spec.choices import Overlong
from lockstep_spec.training import EvaluationConfig
from lockstep_train.base.arrays import Array, Arrays
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.sequences.documents import DocumentRules, Documents, MadeDocuments, blocks_of, documents_of, joined_documents
from lockstep_train.data.sequences.holdout import fixed_subset, held_out, part_of
from lockstep_train.data.tokens.source import DataSource

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
