"""The sources of a run's data, and the tokenized form of each, made once and kept on disk.

A source's tokens are kept whole: not cut to maxLength, not packed, not divided into training and evaluation. So those settings
can be changed without tokenizing again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy

from lockstep_spec.choices import OnBroken, TrainOn
from lockstep_train.base.arrays import Array, Arrays, ArrayWriter, open_arrays, whole_arrays
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.limits import Say
from lockstep_train.data.read.files import DataSource
from lockstep_train.data.read.records import AnySample, Conversation
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.tokens.chat import Encoded
from lockstep_train.data.tokens.encode import encode_paragraphs, paragraph_break
from lockstep_train.data.tokens.pool import Answer, Batch, Encoder, encode_batch, start_pool
from lockstep_train.data.tokens.tokenizer import Tokenizer

VERSION = 7
"""Raised when the same text would give other tokens, or other facts about them."""
BATCH = 2000
"""Samples that are tokenized at once, unless they have more characters:"""
BATCH_CHARACTERS = 4_000_000
"""Most characters of a batch: 150 bytes of memory a token. One sample may have more."""
CHARACTER_BYTES = 150
"""Memory that a character of a sample takes at most while it is tokenized, measured with one of 30 million."""
REPORT_SECONDS = 30.0
NAME = "\0"
"""Stand-in for the source's name in the notes that are kept with its tokens: other files of the same content have the same tokens."""
REMARKS = 8
"""Most kinds of remarks, and most large samples, that are reported."""
TYPES = {"ids": "<i4", "learned": "|u1", "offsets": "<i8", "keys": "<u8", "lines": "<i8", "counts": "<i4", "first": "<i4"}
CONTENT = ("ids", "learned", "offsets")


def token_key(source: DataSource, tokenizer: Tokenizer, train_on: TrainOn, on_broken: OnBroken = OnBroken.FAIL) -> str:
    """The name of the source's token folder: a hash of everything that the tokens follow from."""
    facts = [
        VERSION,
        source.digest,
        source.plain_text,
        tokenizer.digest,
        list(tokenizer.begin),
        tokenizer.end,
        train_on.value,
        on_broken.value,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def tokens_of(
    source: DataSource, tokenizer: Tokenizer, train_on: TrainOn, folder: Path, say: Say, on_broken: OnBroken = OnBroken.FAIL
) -> Arrays:
    """Return the source's tokens: checked, or made now. Raises ConfigError when the source has broken lines that are not to be left out."""
    place = folder / token_key(source, tokenizer, train_on, on_broken)
    arrays = whole_arrays(place, lambda problem: say(f"Rebuilding the token cache of {source.name}: {problem}"))
    if arrays is not None:
        return arrays
    write_tokens(source, tokenizer, train_on, place, say, on_broken)
    return open_arrays(place, verify=False)


def write_tokens(
    source: DataSource, tokenizer: Tokenizer, train_on: TrainOn, place: Path, say: Say, on_broken: OnBroken = OnBroken.FAIL
) -> None:
    """Read, tokenize and write the source in batches, so that memory doesn't grow with it. Raises ConfigError."""
    broken = Broken(source.name)
    writer = ArrayWriter(place, TYPES)
    tokens = samples = read = largest = chats = 0
    pace = Pace(source.name, say)

    def here(batch: Batch) -> Answer:
        if source.plain_text:
            return encode_paragraphs(batch, tokenizer), Broken(source.name)
        return encode_batch(batch, tokenizer, train_on, source.name)

    def noticed(rows: Iterator[AnySample]) -> Iterator[AnySample]:
        nonlocal chats
        for row in rows:
            chats += isinstance(row, Conversation)
            yield row

    remarks = Remarks(NAME)
    encoder = Encoder(here, lambda: start_pool(tokenizer, train_on, source.name, say), say)
    try:
        writer.append("offsets", numpy.zeros(1, numpy.int64))
        with contextlib.closing(encoder.run(batches(with_large_named(noticed(source.samples(broken)), source.name, say)))) as answers:
            for count, (encoded, batch_broken) in answers:
                read += count
                broken.include(batch_broken)
                if encoded and (on_broken is OnBroken.DROP or not broken.count):
                    ids = append_samples(writer, encoded, tokens)
                    remarks.include(encoded)
                    tokens += len(ids)
                    largest = max(largest, int(ids.max()))
                    samples += len(encoded)
                pace.at(read)
        if on_broken is OnBroken.FAIL:
            broken.refuse()
        blank = [f"Data: {NAME}: left out {broken.blank:,} blank rows"] if broken.blank else []
        lost = replace(broken, name=NAME).left_out()
        if not samples:
            raise ConfigError("; ".join(with_source_name([f"the data {NAME} holds no samples", *lost, *blank], source)))
        notes = [*lost, *remarks.notes(), *blank, *replace(broken, name=NAME).not_read()]
        facts = {"source": source.name, "samples": samples, "tokens": tokens, "largest": largest, "chats": chats, "notes": notes}
        writer.commit({**facts, "separator": len(paragraph_break(tokenizer))})
    except BaseException:
        writer.discard()
        raise


def with_source_name(notes: Sequence[str], source: DataSource) -> list[str]:
    """Notes on the tokens of a source, which stand for its name as `NAME`."""
    return [note.replace(NAME, source.name) for note in notes]


class Remarks:
    """Remarks on a source's samples, counted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts: Counter[str] = Counter()
        self._first: dict[str, int] = {}
        self._divided = Counter[str]()

    def include(self, encoded: Sequence[Encoded]) -> None:
        """Count the remarks of the samples of whole lines."""
        for line, group in itertools.groupby(encoded, key=lambda item: item.line):
            samples = list(group)
            self._divided.update({"conversations": 1, "samples": len(samples)} if len(samples) > 1 else ())
            for remark in itertools.chain.from_iterable(sample.remarks for sample in samples):
                self._counts[remark] += 1
                self._first.setdefault(remark, line)

    def notes(self) -> list[str]:
        """Notes of a line each, the most frequent first."""
        divided = (
            f"{self._name}: {self._divided['conversations']:,} conversations make {self._divided['samples']:,} samples, because the chat"
            " template renders earlier answers differently from what the model writes (trainOn: LastTurn learns one of each conversation)"
        )
        warnings = [
            f"WARNING: {self._name}: {count:,} {remark} (the first at line {self._first[remark]:,})"
            for remark, count in self._counts.most_common(REMARKS)
        ]
        return [*([divided] if self._divided else []), *warnings]


class Pace:
    """Report, every now and then, of how many samples are done and how fast they come."""

    def __init__(self, name: str, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._say = say
        self._clock = clock
        self._reported = (clock(), 0)

    def at(self, samples: int) -> None:
        """Report with a batch that is done, and never by the clock: a line is taken for a sign of life."""
        now, (then, before) = self._clock(), self._reported
        if now - then >= REPORT_SECONDS:
            self._reported = (now, samples)
            self._say(f"Tokenized {samples:,} samples of {self._name}, {(samples - before) / (now - then):,.0f}/s")


def with_large_named(samples: Iterator[AnySample], name: str, say: Say) -> Iterator[AnySample]:
    """Yield the samples. Those that are a batch each are named before they are tokenized: what they cost comes first."""
    named = 0
    for sample in samples:
        if sample.characters >= BATCH_CHARACTERS and named < REMARKS:
            named += 1
            say(
                f"WARNING: {name}:{sample.line} is one sample of {sample.characters:,} characters: it is tokenized whole, whatever overlong"
                f" says, which may take minutes and {sample.characters * CHARACTER_BYTES / 1e9:.1f} GB of memory; divide it, or leave"
                " it out"
            )
        yield sample


def batches(samples: Iterator[AnySample]) -> Iterator[list[AnySample]]:
    """Split samples into batches of at most BATCH samples, and no more once they have BATCH_CHARACTERS characters."""
    batch: list[AnySample] = []
    characters = 0
    for sample in samples:
        batch.append(sample)
        characters += sample.characters
        if len(batch) == BATCH or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def append_samples(writer: ArrayWriter, encoded: list[Encoded], before: int) -> Array:
    """Add these samples after `before` tokens, and return the ids of them all. Samples of one conversation have the key of its first one,
    which has all of it: they are evaluated or trained on together.
    """
    lengths = numpy.array([len(item.ids) for item in encoded])
    ids = numpy.fromiter(itertools.chain.from_iterable(item.ids for item in encoded), numpy.int32, int(lengths.sum()))
    learned = numpy.frombuffer(b"".join(item.learned for item in encoded), numpy.uint8)
    starts = numpy.concatenate([[0], numpy.cumsum(lengths)])
    predicted = learned.copy()
    predicted[starts[:-1]] = 0  # a first token is never predicted
    content = ids.tobytes()
    writer.append("ids", ids)
    writer.append("learned", learned)
    writer.append("offsets", starts[1:] + before)
    keys: list[int] = []
    for number, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        with_the_one_before = number > 0 and encoded[number].line == encoded[number - 1].line
        digest = hashlib.sha256(content[4 * start : 4 * end]).digest()  # masks aside: duplicates have the same one, whatever their prompts
        keys.append(keys[-1] if with_the_one_before else int.from_bytes(digest[:8], "big"))
    writer.append("keys", numpy.array(keys, numpy.uint64))
    writer.append("lines", numpy.array([item.line for item in encoded]))
    writer.append("counts", numpy.add.reduceat(predicted, starts[:-1], dtype=numpy.int32))
    positions = numpy.where(predicted, numpy.arange(len(ids)), numpy.iinfo(numpy.int64).max)
    writer.append("first", numpy.minimum(numpy.minimum.reduceat(positions, starts[:-1]) - starts[:-1], numpy.iinfo(numpy.int32).max))
    return ids
