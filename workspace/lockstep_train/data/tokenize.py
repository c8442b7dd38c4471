"""Samples to token ids and labels. A label of -100 is not learned (torch's cross-entropy ignores it)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lockstep_train.data.read import Sample
from lockstep_train.errors import ConfigError

IGNORED = -100


@dataclass(frozen=True)
class Tokeniser:
    """What is needed of a tokenizer, so that this module needs no transformers."""

    encode: Callable[[str], list[int]]
    """Text to token ids, without special tokens."""
    begin: tuple[int, ...]
    """What the model expects before every text (BOS of Llama, [gMASK]<sop> of GLM, nothing for Qwen)."""
    end: int | None
    pad: int


@dataclass(frozen=True)
class Example:
    """Token ids and labels of equal length, at most the maximum length."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    source: str
    documents: tuple[int, ...] = ()
    """With packing: the lengths of the documents it holds."""

    @property
    def packed(self) -> bool:
        return bool(self.documents)

    def unlearned(self) -> Example:
        """The same tokens with nothing to learn: what a rank computes that has no work left."""
        return replace(self, labels=(IGNORED,) * len(self.ids))

    @property
    def key(self) -> str:
        """Hash of the content, so that duplicates have the same key."""
        return hashlib.sha256(repr((self.ids, self.labels)).encode()).hexdigest()

    @property
    def learned_tokens(self) -> int:
        """Tokens that are predicted: the first one never is."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True)
class Tokenised:
    examples: list[Example]
    cut: int
    """How many samples were longer than the maximum and lost their end."""


def tokenise(samples: Sequence[Sample], tokeniser: Tokeniser, max_length: int) -> Tokenised:
    """One example a sample, its end token last.

    Raises ConfigError naming the line of a sample that has nothing to learn within `max_length`.
    """
    cut = 0
    examples: list[Example] = []
    for sample in samples:
        example = _example(sample, tokeniser)
        cut += len(example.ids) > max_length
        example = Example(example.ids[:max_length], example.labels[:max_length], example.source)
        if example.learned_tokens == 0:
            raise ConfigError(
                f"{sample.source}: no token to learn within training.data.maxLength = {max_length}; raise it or shorten the prompt"
            )
        examples.append(example)
    return Tokenised(examples, cut)


def _example(sample: Sample, tokeniser: Tokeniser) -> Example:
    prompt = [*tokeniser.begin, *(tokeniser.encode(sample.prompt) if sample.prompt is not None else [])]
    learned = tokeniser.encode(sample.text) + ([tokeniser.end] if tokeniser.end is not None else [])
    return Example((*prompt, *learned), (*[IGNORED] * len(prompt), *learned), sample.source)


def tokenise_blocks(samples: Sequence[Sample], tokeniser: Tokeniser, max_length: int) -> Tokenised:
    """Plain text: whole paragraphs joined up to `max_length` tokens; a longer paragraph is split, so nothing is lost."""
    separator = tokeniser.encode("\n\n")
    room = max_length - len(tokeniser.begin)
    blocks: list[tuple[list[int], str]] = []
    current: list[int] = []
    source = ""
    for sample in samples:
        ids = tokeniser.encode(sample.text)
        if current and len(current) + len(separator) + len(ids) > room:
            blocks.append((current, source))
            current = []
        source = source if current else sample.source
        current = current + separator + ids if current else ids
        while len(current) > room:
            blocks.append((current[:room], source))
            current = current[room:]
    if current:
        blocks.append((current, source))
    begin = tokeniser.begin
    masked = (IGNORED,) * len(begin)
    examples = [Example((*begin, *ids), (*masked, *ids), where) for ids, where in blocks if len(ids) > 1]
    return Tokenised(examples, cut=0)
