"""Batches of samples and what became of them as JSON, a line each, between a rank and the processes that tokenise for it."""

from __future__ import annotations

import base64
import json
from typing import Any

from lockstep_train.data.read.read import Broken
from lockstep_train.data.read.records import AnySample, Conversation, Sample
from lockstep_train.data.tokens.tokenize import Encoded

Batch = list[AnySample]
Answer = tuple[list[Encoded], Broken]


def batch_line(batch: Batch) -> bytes:
    """Raises TypeError or ValueError where a message holds what JSON has no form for."""
    return _line([vars(sample) for sample in batch])


def batch_of(line: bytes) -> Batch:
    return [Conversation(**_tuples(fields)) if "messages" in fields else Sample(**fields) for fields in json.loads(line)]


def answer_line(answer: Answer) -> bytes:
    found, broken = answer
    samples = [[item.ids, base64.b64encode(item.learned).decode(), item.line, item.remarks] for item in found]
    return _line({"samples": samples, "broken": vars(broken)})


def answer_of(line: bytes) -> Answer:
    """Raises ValueError for half a line."""
    said = json.loads(line)
    samples = [Encoded(ids, base64.b64decode(learned), number, tuple(remarks)) for ids, learned, number, remarks in said["samples"]]
    reasons = [(number, reason) for number, reason in said["broken"].pop("reasons")]
    return samples, Broken(**said["broken"], reasons=reasons)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, **{name: tuple(fields[name]) for name in ("messages", "tools", "untrained")}}


def _line(value: Any) -> bytes:
    """Lone surrogates, which no UTF-8 has, pass as escapes."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
