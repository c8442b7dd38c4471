"""Samples as token ids, and which of them are learned. A label of -100 is not learned (torch's cross-entropy ignores it)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy

from lockstep_spec.choices import TrainOn
from lockstep_train.data.read.records import AnySample, Conversation, Sample
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.tokens.chat import BREAK, Encoded, across, encode_conversation
from lockstep_train.data.tokens.tokenizer import Tokenizer
from lockstep_train.data.tokens.turns import Span

IGNORED = -100
NO_TEMPLATE = (
    "chats (`messages`, `conversations`, `instruction`) need a chat template, which the model's folder doesn't have: set"
    " training.data.chatTemplate to a file with one (and a tokenizer with a tokenizer.json: others don't know where tokens stand)"
)


@dataclass(frozen=True)
class Example:
    """One sequence as the model gets it: token ids and labels of equal length."""

    ids: numpy.ndarray[Any, Any]
    labels: numpy.ndarray[Any, Any]
    source: str
    """file:line of what it begins with."""
    documents: tuple[int, ...] = ()
    """Lengths of the documents it holds, with packing."""

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


def encode_samples(samples: Sequence[AnySample], tokenizer: Tokenizer, train_on: TrainOn, broken: Broken) -> list[Encoded]:
    """Encode every sample with its end token; those in which nothing is learned are broken."""
    plain = [sample for sample in samples if isinstance(sample, Sample)]
    prompts = iter(tokenizer.encode_all([sample.prompt for sample in plain if sample.prompt is not None]))
    answers = iter(encode_continued([sample.text for sample in plain if sample.prompt is not None], tokenizer))
    texts = iter(tokenizer.encode_all([sample.text for sample in plain if sample.prompt is None]))
    result: list[Encoded] = []
    for sample in samples:
        try:
            if isinstance(sample, Conversation):
                encoded = _conversation(sample, tokenizer, train_on)
            elif sample.prompt is not None:
                encoded = [_plain(sample, next(prompts), next(answers), tokenizer, train_on)]
            else:
                encoded = [_plain(sample, [], next(texts), tokenizer, train_on)]
        except ValueError as error:
            broken.add(sample.line, str(error))
            continue
        learned = [item for item in encoded if 1 in item.learned[1:]]
        result += learned
        if not learned:
            broken.add(sample.line, "no token of it is learned")
    return result


def _plain(sample: Sample, prompt: list[int], text: list[int], tokenizer: Tokenizer, train_on: TrainOn) -> Encoded:
    before = [*tokenizer.begin, *prompt]
    answer = [*text, tokenizer.end] if tokenizer.end is not None else text
    masked = len(tokenizer.begin) if train_on is TrainOn.ALL else len(before)
    return Encoded([*before, *answer], bytes(masked) + b"\1" * (len(before) + len(answer) - masked), sample.line)


def _conversation(conversation: Conversation, tokenizer: Tokenizer, train_on: TrainOn) -> list[Encoded]:
    if tokenizer.chat is None:
        raise ValueError(NO_TEMPLATE)
    return encode_conversation(conversation, tokenizer.chat, train_on)


def encode_paragraphs(samples: Sequence[AnySample], tokenizer: Tokenizer) -> list[Encoded]:
    """Encode plain text: every paragraph with the break after it, so that neighbors can simply be put together."""
    paragraphs = [sample for sample in samples if isinstance(sample, Sample)]
    tail = paragraph_break(tokenizer)
    return [
        Encoded([*ids, *tail], b"\1" * (len(ids) + len(tail)), paragraph.line)
        for ids, paragraph in zip(encode_continued([paragraph.text for paragraph in paragraphs], tokenizer), paragraphs, strict=True)
        if ids
    ]


def paragraph_break(tokenizer: Tokenizer) -> list[int]:
    """The break's tokens as they are after a text, and not at the beginning of one."""
    return _within("a", BREAK, tokenizer) or tokenizer.encode(BREAK)


def encode_continued(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of texts that others stand before: answers after their prompts, paragraphs after paragraphs.

    Most tokenizers give the same ids as without. Those of Llama 2 and Mistral put the mark of a word's beginning before every text:
    the model would learn a space that isn't there. With them each text is encoded after a break and cut there.
    """
    after = _within(BREAK, "a", tokenizer)
    if tokenizer.places is None or not after or after == tokenizer.encode("a"):
        return tokenizer.encode_all(texts)
    cut = [_after(len(BREAK), *placed) for placed in tokenizer.places([BREAK + text for text in texts])]
    return [tokenizer.encode(text) if ids is None else ids for ids, text in zip(cut, texts, strict=True)]


def _within(before: str, text: str, tokenizer: Tokenizer) -> list[int] | None:
    """The text's own tokens when something stands before it; None where the tokenizer can't tell."""
    return _after(len(before), *tokenizer.places([before + text])[0]) if tokenizer.places is not None else None


def _after(border: int, ids: list[int], spans: list[Span]) -> list[int] | None:
    """The ids from this character on; None where one lies across it."""
    return ids[bisect_left(spans, border, key=itemgetter(0)) :] if across(spans, border) is None else None
