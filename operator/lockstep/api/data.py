"""What is trained and evaluated on: spec.training.data and spec.training.evaluation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lockstep.api.model import AbsolutePath, Decimal, Model, Rule, Share, free_form_fits, no_password
from lockstep_sizes.choices import TEMPLATE_OWN, DataFormat, OnBroken, Overlong, TrainOn

DATA_PATH_PATTERN = r"^(/[^\x00]*|(s3|gs|gcs|abfs|abfss)://[^\s/]+/[^\s]+)$"
DataPath = Annotated[str, Field(pattern=DATA_PATH_PATTERN, max_length=1024)]
"""A path, or an address of an object store."""
HubName = Annotated[str, Field(min_length=1, max_length=256)]
ConfigName = Annotated[str, Field(min_length=1, max_length=128)]
Split = Annotated[str, Field(min_length=1, max_length=128)]


_REVISION_OF_NAME = Rule(
    "!has(self.revision) || has(self.name)",
    "revision needs the name of a dataset of the hub: files and object stores have none",
    lambda o: o.revision is None or o.name is not None,
    field="revision",
)


class DataSource(Model):
    """One of several sources of samples."""

    path: DataPath | None = None
    """A file, a pattern or a folder, as data.path."""
    name: HubName | None = None
    """A dataset of the Hugging Face hub, for example org/dataset; downloaded once a volume."""
    config: ConfigName | None = None
    """The configuration of a hub dataset or of a folder, for example wikitext-2-raw-v1. Left out: the only one, or the default one."""
    split: Split = "train"
    """The split of a hub dataset or of a folder; train[:1000] and train[:10%] take a part of it, train+test several."""
    revision: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """The hub dataset's commit. Default: the newest one at the first download, then that one."""
    format: DataFormat = DataFormat.AUTO
    weight: Decimal = "1"
    """How often each sample of the source is seen in an epoch: 2 doubles it, 0.5 takes half of it."""

    RULES = (
        Rule(
            "has(self.path) != has(self.name)", "exactly one of path and name must be set", lambda o: (o.path is None) != (o.name is None)
        ),
        no_password("path"),
        _REVISION_OF_NAME,
    )


def _one_source(o: Data) -> bool:
    return [o.path is not None, o.name is not None, bool(o.sources)].count(True) == 1


def _no_own_variables(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    own = sorted(TEMPLATE_OWN & (variables or {}).keys())
    if own:
        raise PydanticCustomError("own_variable", f"may not hold {', '.join(own)}: Lockstep sets that itself for every chat")
    return variables


class Data(Model):
    """The text to train on."""

    path: DataPath | None = None
    """A file of JSON lines, a table (Parquet, Arrow, CSV, TSV) or plain text, compressed or not; a pattern such as /datasets/*.parquet; a folder of such files; or an address of these in an object store, such as s3://bucket/folder."""
    name: HubName | None = None
    """A dataset of the Hugging Face hub, for example org/dataset; downloaded once a volume."""
    config: ConfigName | None = None
    """The configuration of a hub dataset or of a folder, for example wikitext-2-raw-v1. Left out: the only one, or the default one."""
    split: Split = "train"
    """The split of a hub dataset or of a folder; train[:1000] and train[:10%] take a part of it, train+test several."""
    revision: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """The hub dataset's commit. Default: the newest one at the first download, then that one."""
    format: DataFormat = DataFormat.AUTO
    sources: Annotated[list[DataSource], Field(max_length=64)] = []
    """Several sources, instead of one path or name."""
    max_length: Annotated[int, Field(ge=8, le=1048576)] = 2048
    """Tokens of a sample; with packing, of a pack."""
    overlong: Overlong = Overlong.TRUNCATE
    train_on: TrainOn = TrainOn.ASSISTANT
    on_broken: OnBroken = OnBroken.FAIL
    chat_template: AbsolutePath | None = None
    """A file with the chat template to use instead of the tokenizer's own."""
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(max_length=64), AfterValidator(free_form_fits), AfterValidator(_no_own_variables)
    ] = None
    """Variables of the chat template, for example enable_thinking: false. A row's chat_template_kwargs go before them. At most 65536 bytes and 32 levels, and none that Lockstep sets itself: condition Accepted says it."""
    packing: bool = False
    """Put several samples into one sequence of maxLength tokens, kept apart by their positions."""

    RULES = (
        Rule(
            "(has(self.path) ? 1 : 0) + (has(self.name) ? 1 : 0) + (has(self.sources) && size(self.sources) > 0 ? 1 : 0) == 1",
            "exactly one of path, name and sources must be set",
            _one_source,
        ),
        no_password("path"),
        _REVISION_OF_NAME,
    )


class EvaluationData(Model):
    """Samples for evaluation of their own."""

    path: DataPath | None = None
    """A file, a pattern or a folder, as data.path."""
    name: HubName | None = None
    """A dataset of the Hugging Face hub, as data.name."""
    config: ConfigName | None = None
    """As data.config."""
    split: Split | None = None
    """As data.split. Default: validation, or the only one."""
    revision: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """As data.revision."""
    format: DataFormat = DataFormat.AUTO

    RULES = (
        Rule(
            "has(self.path) != has(self.name)", "exactly one of path and name must be set", lambda o: (o.path is None) != (o.name is None)
        ),
        no_password("path"),
        _REVISION_OF_NAME,
    )


class Evaluation(Model):
    """How the loss on text that is not trained on is measured."""

    data: EvaluationData | None = None
    """Samples for evaluation of their own. Left out: holdout says which samples of the data are used."""
    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 50
    """Optimizer steps between two evaluations."""
    holdout: Share = "0.02"
    """The share of samples kept for evaluation, chosen by their content, for example 0.02. Not read with data."""
    samples: Annotated[int, Field(ge=1, le=1000000)] = 200
    """Held-out samples to evaluate at most, always the same ones."""
