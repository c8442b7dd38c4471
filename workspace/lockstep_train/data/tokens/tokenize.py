"""Samples to token ids, and which of them are learned. A label of -100 is not learned (torch's cross-entropy ignores it)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy

from lockstep_spec.choices import TrainOn
from lockstep_train.data.read.read import Broken
from lockstep_train.data.read.records import AnySample, Conversation, Sample
from lockstep_train.data.tokens.chat import encode_conversation
from lockstep_train.data.tokens.turns import ChatTemplate, Span, TemplateChoice

IGNORED = -100
PARAGRAPH_BREAK = "\n\n"
NO_TEMPLATE = "chats (`messages`, `conversations`, `instruction`) need a tokenizer with a chat template and character offsets, which the model's folder doesn't have"


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
    places: Callable[[list[str]], list[tuple[list[int], list[Span]]]] | None = None
    """Of each text its ids, without special tokens, and where in it each token stands; None: the tokenizer doesn't know."""
    decode: Callable[[list[int]], str] = str
    digest: str = ""
    """Tells one tokenizer from another."""
    folder: Path | None = None
    """Where it was loaded from, and can be loaded again."""
    choice: TemplateChoice = field(default_factory=TemplateChoice)
    """Which chat template it was loaded with."""
    vocabulary: int | None = None
    """Rows of the model's embedding; None: it can't be told before the model is loaded."""
    stops: frozenset[int] = frozenset()
    """The tokens at which the model stops writing."""

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
    """A whole sample, however long. A conversation may make several, which follow each other; the first one has all of it."""

    ids: list[int]
    learned: bytes
    """A byte a token: 1 where it is learned."""
    line: int
    remarks: tuple[str, ...] = ()
    """What is odd about its answers; one that holds for several turns is there several times."""


def encode_samples(samples: Sequence[AnySample], tokeniser: Tokeniser, train_on: TrainOn, broken: Broken) -> list[Encoded]:
    """Every sample with its end token; those in which nothing is learned are broken."""
    plain = [sample for sample in samples if isinstance(sample, Sample)]
    prompts = iter(tokeniser.encode_all([sample.prompt for sample in plain if sample.prompt is not None]))
    answers = iter(encode_continued([sample.text for sample in plain if sample.prompt is not None], tokeniser))
    texts = iter(tokeniser.encode_all([sample.text for sample in plain if sample.prompt is None]))
    found: list[Encoded] = []
    for sample in samples:
        try:
            if isinstance(sample, Conversation):
                encoded = _conversation(sample, tokeniser, train_on)
            elif sample.prompt is not None:
                encoded = [_plain(sample, next(prompts), next(answers), tokeniser, train_on)]
            else:
                encoded = [_plain(sample, [], next(texts), tokeniser, train_on)]
        except ValueError as error:
            broken.add(sample.line, str(error))
            continue
        learned = [item for item in encoded if 1 in item.learned[1:]]
        found += learned
        if not learned:
            broken.add(sample.line, "no token of it is learned")
    return found


def _plain(sample: Sample, prompt: list[int], text: list[int], tokeniser: Tokeniser, train_on: TrainOn) -> Encoded:
    given = [*tokeniser.begin, *prompt]
    answer = [*text, tokeniser.end] if tokeniser.end is not None else text
    masked = len(tokeniser.begin) if train_on is TrainOn.ALL else len(given)
    return Encoded([*given, *answer], bytes(masked) + b"\1" * (len(given) + len(answer) - masked), sample.line)


def _conversation(conversation: Conversation, tokeniser: Tokeniser, train_on: TrainOn) -> list[Encoded]:
    if tokeniser.chat is None:
        raise ValueError(NO_TEMPLATE)
    samples = encode_conversation(conversation, tokeniser.chat, train_on)
    return [Encoded(sample.ids, sample.learned, conversation.line, sample.remarks) for sample in samples]


def encode_paragraphs(samples: Sequence[AnySample], tokeniser: Tokeniser) -> list[Encoded]:
    """Plain text: every paragraph with the break after it, so that neighbours can simply be put together."""
    paragraphs = [sample for sample in samples if isinstance(sample, Sample)]
    tail = paragraph_break(tokeniser)
    return [
        Encoded([*ids, *tail], b"\1" * (len(ids) + len(tail)), paragraph.line)
        for ids, paragraph in zip(encode_continued([paragraph.text for paragraph in paragraphs], tokeniser), paragraphs, strict=True)
        if ids
    ]


def paragraph_break(tokeniser: Tokeniser) -> list[int]:
    """The break's tokens as they are after a text, and not at the beginning of one."""
    return _within("a", PARAGRAPH_BREAK, tokeniser) or tokeniser.encode(PARAGRAPH_BREAK)


def encode_continued(texts: list[str], tokeniser: Tokeniser) -> list[list[int]]:
    """The ids of texts that others stand before: answers after their prompts, paragraphs after paragraphs.

    Most tokenizers give the same ids as without. Those of Llama 2 and Mistral put the mark of a word's beginning before every text:
    the model would learn a space that isn't there. With them each text is encoded after a break and cut there.
    """
    after = _within(PARAGRAPH_BREAK, "a", tokeniser)
    if tokeniser.places is None or not after or after == tokeniser.encode("a"):
        return tokeniser.encode_all(texts)
    cut = [_after(len(PARAGRAPH_BREAK), *placed) for placed in tokeniser.places([PARAGRAPH_BREAK + text for text in texts])]
    return [tokeniser.encode(text) if ids is None else ids for ids, text in zip(cut, texts, strict=True)]


def _within(before: str, text: str, tokeniser: Tokeniser) -> list[int] | None:
    """The text's own tokens when something stands before it; None where the tokenizer can't tell."""
    return _after(len(before), *tokeniser.places([before + text])[0]) if tokeniser.places is not None else None


def _after(border: int, ids: list[int], spans: list[Span]) -> list[int] | None:
    """The ids from this character on; None where one lies across it."""
    first = bisect_left(spans, border, key=itemgetter(0))
    return ids[first:] if all(end <= border for _, end in spans[:first]) else None
