"""A tokenizer whose tokens are bytes, and data made with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep_spec.training import DataConfig, EvaluationConfig
from lockstep_train.data.dataset import Dataset, open_dataset, prepare
from lockstep_train.data.tokens.tokenizer import Tokenizer

BYTES = Tokenizer(encode=lambda text: list(text.encode()), begin=(300,), end=301, pad=301)
PLAIN_BYTES = Tokenizer(encode=lambda text: list(text.encode()), begin=(), end=None, pad=0)


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def dataset_of(
    cache: Path, tokenizer: Tokenizer = BYTES, evaluation: EvaluationConfig | None = None, told: list[str] | None = None, **data: Any
) -> Dataset:
    """What a run with these settings trains on; `told` receives what is said while it is made."""
    lines = told if told is not None else []
    return open_dataset(prepare(DataConfig(**{"max_length": 64, **data}), evaluation, tokenizer, cache, lines.append), tokenizer)


def text_of(ids: Any) -> str:
    return bytes(int(token) for token in ids if token < 256).decode()
