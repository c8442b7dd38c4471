"""Samples from a file, one at a time: JSON lines, a JSON array, or plain text.

A file is never held in memory. Every broken line is counted and the first ones are reported with file:line, so that a file is mended
in one go; nothing is dropped silently.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import json
import re
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_train.base.errors import ConfigError, refusal
from lockstep_train.data.read.records import TOO_DEEP, AnySample, Sample, object_of, parse_object, sample_of
from lockstep_train.data.read.streams import ARCHIVES, ARROW, JSON, PARQUET, TABLES, is_compressed, open_data, suffix_of

REPORTED_LINES = 5
Form = Callable[[dict[str, Any], int], AnySample | None]
"""Form of records: (record, line) → sample; None where the record holds nothing. Raises ValueError."""


@dataclass
class Broken:
    """The lines of one source that can't be used."""

    name: str
    reasons: list[tuple[int, str]] = field(default_factory=list)
    """The first lines of them, in the order of the file, however they were found."""
    count: int = 0
    blank: int = 0
    """Rows that hold nothing."""

    def at(self, line: int) -> None:
        """Note each line or row that is read, before what becomes of it."""

    def skip(self, line: int) -> None:
        """Count a row that holds nothing: that is no mistake, but it is reported."""
        self.blank += 1

    def add(self, line: int, reason: str) -> None:
        self.count += 1
        insort(self.reasons, (line, reason))
        del self.reasons[REPORTED_LINES:]

    def include(self, other: Broken) -> None:
        """Add those that were found elsewhere."""
        self.count += other.count
        self.blank += other.blank
        self.reasons = sorted([*self.reasons, *other.reasons])[:REPORTED_LINES]

    @property
    def first(self) -> list[str]:
        return [f"{self.name}:{line}: {reason}" for line, reason in self.reasons]

    def refuse(self) -> None:
        """Raise ConfigError when there are any."""
        if self.count:
            raise ConfigError(
                f"{self.count} broken lines in the data: {self._listed()}; fix them, or set training.data.onBroken to Drop to leave"
                " them out"
            )

    def left_out(self) -> list[str]:
        """Warn of those that are not refused, in a line; in none when there are none."""
        return [f"WARNING: {self.name}: leaving out {self.count:,} broken lines: {self._listed()}"] if self.count else []

    def _listed(self) -> str:
        more = f" (and {self.count - REPORTED_LINES} more)" if self.count > REPORTED_LINES else ""
        return "; ".join(self.first) + more


def is_plain_text(path: Path) -> bool:
    """Return True for plain text, by the file's name, where no format is stated. Raises ConfigError for what is neither, though it may look
    so.
    """
    if suffix_of(path) in {*TABLES, *JSON}:
        return False
    if _begins_with_object(path):
        raise ConfigError(
            f"the data {path} would be plain text by its name, but begins with a JSON object; set its format to JSONL or name it .jsonl, "
            "or set its format to Text to learn the JSON itself"
        )
    return True


def refuse_packed(path: Path) -> None:
    """Raise ConfigError for a file whose content can't be read from its beginning to its end."""
    suffix = suffix_of(path)
    if suffix in ARCHIVES:
        raise ConfigError(f"the data {path} is an archive ({suffix}); unpack it, and name its folder")
    if suffix in {PARQUET, *ARROW} and is_compressed(path):
        raise ConfigError(
            f"the data {path} is a compressed {suffix} file, which can't be read as a stream; decompress it ({suffix} files compress their"
            " columns themselves)"
        )


BEGINS_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[")
BEGINS_OBJECTS = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{\s*\"")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a data file. Raises ConfigError when it can't be read, also later, or TrainerError for a fault that may pass."""
    try:
        with open_data(path) as file:
            yield file
    except OSError as error:
        raise refusal(f"the data {path} can't be read: {error.strerror}", error) from error


def _begins_with_object(path: Path) -> bool:
    """Return True if the first line that is not blank is a JSON object, or the file begins as an array of them."""
    with _opened(path) as file:
        beginning = file.peek(4096)
        first = next((line for line in file if line.strip()), b"")
    try:
        return BEGINS_OBJECTS.match(beginning) is not None or isinstance(json.loads(first.decode("utf-8-sig")), dict)
    except RecursionError:
        return first.lstrip().startswith(b"{")
    except ValueError:
        return False


def read_lines(path: Path, broken: Broken) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers; one that is not UTF-8 is broken. Raises ConfigError when the file can't be read."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            broken.at(number)
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                broken.add(number, "not UTF-8; convert the file to UTF-8")


def usable(form: Form, parse: Callable[[Any], dict[str, Any]], content: object, line: int, broken: Broken) -> Iterator[AnySample]:
    """Yield the sample of a line or a row; none where it holds nothing or is broken, which `broken` records."""
    try:
        sample = form(parse(content), line)
    except RecursionError:
        broken.add(line, TOO_DEEP)
    except ValueError as error:
        broken.add(line, str(error))
    else:
        if sample is None:
            broken.skip(line)
        else:
            yield sample


def paragraph_of(record: dict[str, Any], line: int) -> Sample | None:
    """The `text` of a record as a paragraph of plain text, None for a blank one. Raises ValueError."""
    if "text" not in record:
        raise ValueError("there is no `text`, and `format: Text` reads nothing else")
    text = record["text"]
    if text is not None and not isinstance(text, str):
        raise ValueError("`text` is not a string")
    return Sample(text.strip("\r\n").rstrip(), None, line) if text and text.strip() else None


def read_jsonl(path: Path, broken: Broken, form: Form = sample_of) -> Iterator[AnySample]:
    """Yield a sample for each line that is not blank, or for each object of an array. Raises ConfigError when the file can't be read."""
    with _opened(path) as file:
        is_array = BEGINS_ARRAY.match(file.peek(4096)) is not None
    if is_array:
        yield from read_array(path, broken, form)
        return
    for number, line in read_lines(path, broken):
        if line.strip():
            yield from usable(form, parse_object, line, number, broken)


NO_TEXT = "not text: it holds a NUL byte; if the file is text, convert it to UTF-8"


def read_text(path: Path, broken: Broken) -> Iterator[AnySample]:
    """Paragraphs: runs of lines that are not blank, each with the number of its first line."""
    block: list[str] = []
    first = 1
    for number, line in read_lines(path, broken):
        if "\0" in line:
            broken.add(number, NO_TEXT)
        elif line.strip():
            first = first if block else number
            block.append(line.rstrip())
        elif block:
            yield Sample("\n".join(block), None, first)
            block = []
    if block:
        yield Sample("\n".join(block), None, first)


CHUNK = 1 << 20
LONGEST_OBJECT = 64 << 20
NOT_AT_AN_END = 16
"""Characters before the end of what was read by which the parser notices that a word, a number or an escape is cut off."""


def read_array(path: Path, broken: Broken, form: Form = sample_of) -> Iterator[AnySample]:
    """The samples of a file that is one JSON array, its objects counted from 1 as lines are. Raises ConfigError at an error of syntax, for
    what comes after it can't be read.
    """
    with _opened(path) as file:
        decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        texts = (text for chunk in iter(lambda: file.read(CHUNK), b"") if (text := decode(chunk)))
        elements = _Elements(lambda: next(texts, ""))
        for number in itertools.count(1):
            try:
                element = elements.next()
            except ValueError as error:
                raise ConfigError(
                    f"{path}:{elements.line}: {error}; an array can't be read past that: fix it, or write one object per line"
                ) from error
            if element is None:
                return
            broken.at(number)
            yield from usable(form, object_of, element[0], number, broken)


BLANK = re.compile(r"\s*")


class _Elements:
    """The elements of one JSON array, each parsed when it is asked for.

    Not ijson (3.6.0): it names no line, has no bound for an element (200 kB of brackets take all memory), and refuses NaN and a BOM.
    """

    def __init__(self, read: Callable[[], str]) -> None:
        """`read` gives the next characters, none at the end."""
        self.line = 1
        """Line where the element begins that is wrong, or what stands in its place."""
        self._read = read
        self._text = ""
        self._position = 0
        self._line = 1
        self._ended = False
        self._begun = False
        self._decoder = json.JSONDecoder()

    def next(self) -> tuple[object] | None:
        """The next element, None after the last one. Raises ValueError."""
        mark = self._character()
        if mark == "," if self._begun else mark == "[":
            self._advance(1)
            following = self._character()
            if following != "]" or self._begun:
                self._begun = True
                return (self._element(),)
            mark = following
        if mark != "]":
            raise ValueError(
                f"not valid JSON (a comma or ] was expected, not {mark!r})" if mark else "not valid JSON (the array has no end)"
            )
        self._advance(1)
        if self._character():
            raise ValueError("not valid JSON (the array has ended before)")
        return None

    def _element(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - NOT_AT_AN_END
                if not cut_off or self._ended:
                    raise ValueError(f"not valid JSON ({error.msg})") from error
                if len(self._text) - self._position > LONGEST_OBJECT:
                    raise ValueError(f"an object of more than {LONGEST_OBJECT >> 20} MiB, or a quote that is never closed") from error
                for _ in range(1 + (len(self._text) - self._position) // CHUNK):  # as much again, so that no object is parsed often
                    self._more()
            except RecursionError as error:
                raise ValueError(TOO_DEEP) from error
            else:
                if end < len(self._text) or self._ended:
                    self._advance(end - self._position)
                    return value
                self._more()  # a number may go on

    def _character(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            blank = BLANK.match(self._text, self._position)
            self._advance(blank.end() - self._position if blank else 0)
            self.line = self._line
            if self._position < len(self._text) or self._ended:
                return self._text[self._position : self._position + 1]
            self._more()

    def _advance(self, count: int) -> None:
        self._line += self._text.count("\n", self._position, self._position + count)
        self._position += count

    def _more(self) -> None:
        try:
            read = self._read()
        except UnicodeDecodeError as error:
            raise ValueError("not UTF-8; convert the file to UTF-8") from error
        self._ended = not read
        self._text = self._text[self._position :] + read
        self._position = 0
