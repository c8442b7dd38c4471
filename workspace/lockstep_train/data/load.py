"""The run's data: read, tokenised, split."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from lockstep_train.config import DataConfig, EvaluationConfig
from lockstep_train.data.holdout import fixed_subset, split
from lockstep_train.data.read import is_jsonl, read_samples
from lockstep_train.data.tokenize import Example, Tokeniser, tokenise, tokenise_blocks
from lockstep_train.errors import ConfigError


@dataclass(frozen=True)
class Dataset:
    training: list[Example]
    evaluation: list[Example]
    digest: str
    """SHA-256 over the training examples in order: another one means that a data cursor has no meaning."""
    cut: int


def load_dataset(data: DataConfig, evaluation: EvaluationConfig | None, tokeniser: Tokeniser) -> Dataset:
    """Raises ConfigError when the file has broken lines or nothing is left to train on."""
    path = Path(data.path or "")
    samples = read_samples(path)
    tokenised = (tokenise if is_jsonl(path) else tokenise_blocks)(samples, tokeniser, data.max_length)
    training, held_out = split(tokenised.examples, evaluation.holdout) if evaluation else (tokenised.examples, [])
    if not training:
        raise ConfigError(f"training.data.path {path} leaves no sample to train on; add samples or lower training.evaluation.holdout")
    digest = hashlib.sha256("".join(example.key for example in training).encode()).hexdigest()
    return Dataset(training, fixed_subset(held_out, evaluation.samples) if evaluation else [], digest, tokenised.cut)
