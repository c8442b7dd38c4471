"""Samples to token ids, and which of them are learned. A label of -100 is not learned (torch's cross-entropy ignores it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from lockstep_sizes.choices import TrainOn
from lockstep_train.data.chat import ChatTemplate, encode_conversation
from lockstep_train.data.read import AnySample, Broken, Conversation, Sample

IGNORED = -100
PARAGRAPH_BREAK = "\n\n"
NO_TEMPLATE = "`messages` need a tokenizer with a chat template and character offsets, which the model's folder doesn't have"


@dataclass(frozen=True)
class Tokeniser:
    """What is needed of a tokenizer, so that this module needs no transformers."""

    encode: Callable[[str], list[int]]
    """Text to token ids, without special tokens."""
    begin: tuple[int, ...]
    """What the model expects before every text (BOS of Llama, [gMASK]<sop> of GLM, nothing for Qwen)."""
    end: int | None
    pad: int
    chat: ChatTemplate | None = None
    encode_many: Callable[[list[str]], list[list[int]]] | None = None
    """The same for many texts at once, which fast tokenizers do on several cores."""
    decode: Callable[[list[int]], str] = str
    digest: str = ""
    """Tells one tokenizer from another."""

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        return self.encode_many(texts) if self.encode_many is not None else [self.encode(text) for text in texts]


@dataclass(frozen=True)
class Example:
    """One sequence as the model gets it: token ids and labels of equal length."""

    ids: numpy.ndarray[Any, Any]
    labels: numpy.ndarray[Any, Any]
    source: str
    """file:line of what it begins with."""
    documents: tuple[int, ...] = ()
    """With packing: the lengths of the documents it holds."""

    @property
    def packed(self) -> bool:
        return bool(self.documents)

    @property
    def learned_tokens(self) -> int:
        """Tokens that are predicted: the first one never is."""
        return int(numpy.count_nonzero(self.labels[1:] != IGNORED))

    def unlearned(self) -> Example:
        """The same tokens with nothing to learn: what a rank computes that has no work left."""
        return Example(self.ids, numpy.full_like(self.labels, IGNORED), self.source, self.documents)


@dataclass(frozen=True)
class Encoded:
    """A whole sample, however long."""

    ids: list[int]
    learned: bytes
    """A byte a token: 1 where it is learned."""
    line: int


def encode_samples(samples: Sequence[AnySample], tokeniser: Tokeniser, train_on: TrainOn, broken: Broken) -> list[Encoded]:
    """Every sample with its end token; those in which nothing is learned are broken."""
    plain = [sample for sample in samples if isinstance(sample, Sample)]
    texts = iter(tokeniser.encode_all([part for sample in plain for part in (sample.prompt or "", sample.text)]))
    found: list[Encoded] = []
    for sample in samples:
        try:
            encoded = (
                _conversation(sample, tokeniser, train_on)
                if isinstance(sample, Conversation)
                else _plain(sample, next(texts), next(texts), tokeniser, train_on)
            )
        except ValueError as error:
            broken.add(sample.line, str(error))
            continue
        if 1 in encoded.learned[1:]:
            found.append(encoded)
        else:
            broken.add(sample.line, "no token of it is learned")
    return found


def _plain(sample: Sample, prompt: list[int], text: list[int], tokeniser: Tokeniser, train_on: TrainOn) -> Encoded:
    given = [*tokeniser.begin, *prompt]
    answer = [*text, tokeniser.end] if tokeniser.end is not None else text
    masked = len(tokeniser.begin) if train_on is TrainOn.ALL else len(given)
    return Encoded([*given, *answer], bytes(masked) + b"\1" * (len(given) + len(answer) - masked), sample.line)


def _conversation(conversation: Conversation, tokeniser: Tokeniser, train_on: TrainOn) -> Encoded:
    if tokeniser.chat is None:
        raise ValueError(NO_TEMPLATE)
    return Encoded(*encode_conversation(conversation, tokeniser.chat, train_on), conversation.line)


def encode_paragraphs(samples: Sequence[AnySample], tokeniser: Tokeniser) -> list[Encoded]:
    """Plain text: every paragraph with the break after it, so that neighbours can simply be put together."""
    paragraphs = [sample for sample in samples if isinstance(sample, Sample)]
    tail = tokeniser.encode(PARAGRAPH_BREAK)
    encoded = tokeniser.encode_all([paragraph.text for paragraph in paragraphs])
    return [
        Encoded([*ids, *tail], b"\1" * (len(ids) + len(tail)), paragraph.line)
        for ids, paragraph in zip(encoded, paragraphs, strict=True)
        if ids
    ]
