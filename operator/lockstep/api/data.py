"""What is trained and evaluated on: spec.training.data and spec.training.evaluation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lockstep.api.model import AbsolutePath, Decimal, Model, Rule, Share
from lockstep_sizes.choices import DataFormat, Overlong, TrainOn


class DataSource(Model):
    """One of several sources of samples."""

    path: AbsolutePath | None = None
    """A file, as data.path."""
    name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """A dataset of the Hugging Face hub, for example org/dataset; downloaded once a volume."""
    split: Annotated[str, Field(min_length=1, max_length=128)] = "train"
    """The hub dataset's split."""
    revision: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """The hub dataset's commit. Default: the newest one at the first download, then that one."""
    format: DataFormat = DataFormat.AUTO
    weight: Decimal = "1"
    """How often each sample of the source is seen in an epoch: 2 doubles it, 0.5 takes half of it."""

    RULES = (
        Rule(
            "has(self.path) != has(self.name)", "exactly one of path and name must be set", lambda o: (o.path is None) != (o.name is None)
        ),
    )


def _one_source(o: Data) -> bool:
    return [o.path is not None, o.name is not None, bool(o.sources)].count(True) == 1


class Data(Model):
    """The text to train on."""

    path: AbsolutePath | None = None
    """A JSONL file with text, prompt and completion, or messages, a line; or a plain text file."""
    name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """A dataset of the Hugging Face hub, for example org/dataset; downloaded once a volume."""
    split: Annotated[str, Field(min_length=1, max_length=128)] = "train"
    """The hub dataset's split."""
    revision: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """The hub dataset's commit. Default: the newest one at the first download, then that one."""
    format: DataFormat = DataFormat.AUTO
    sources: Annotated[list[DataSource], Field(max_length=64)] = []
    """Several sources, instead of one path or name."""
    max_length: Annotated[int, Field(ge=8, le=1048576)] = 2048
    """Tokens of a sample; with packing, of a pack."""
    overlong: Overlong = Overlong.TRUNCATE
    train_on: TrainOn = TrainOn.ASSISTANT
    packing: bool = False
    """Put several samples into one sequence of maxLength tokens, kept apart by their positions."""

    RULES = (
        Rule(
            "(has(self.path) ? 1 : 0) + (has(self.name) ? 1 : 0) + (has(self.sources) && size(self.sources) > 0 ? 1 : 0) == 1",
            "exactly one of path, name and sources must be set",
            _one_source,
        ),
    )


class EvaluationData(Model):
    """Samples for evaluation from a file of their own."""

    path: AbsolutePath
    """A file, as data.path."""


class Evaluation(Model):
    """How the loss on text that is not trained on is measured."""

    data: EvaluationData | None = None
    """Samples for evaluation from a file of their own. Left out: holdout says which samples of the data are used."""
    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 50
    """Optimizer steps between two evaluations."""
    holdout: Share = "0.02"
    """The share of samples kept for evaluation, chosen by their content, for example 0.02. Not read with data."""
    samples: Annotated[int, Field(ge=1, le=1000000)] = 200
    """Held-out samples to evaluate at most, always the same ones."""
