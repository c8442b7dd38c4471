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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_train.base.errors import ConfigError, refusal
from lockstep_train.data.read.records import NO_COLUMNS, TOO_DEEP, AnySample, Sample, object_of, parse_object, quoted, sample_of
from lockstep_train.data.read.streams import ARCHIVES, ARROW, JSON, PARQUET, TABLES, disguise, is_compressed, not_utf8, open_data, suffix_of

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
    unread: dict[str, None] = field(default_factory=dict)
    """Keys that rows have and that are not read, each once."""

    def at(self, line: int) -> None:
        """Note each line or row that is read, before what becomes of it."""

    def skip(self, line: int) -> None:
        """Count a row that holds nothing: that is no mistake, but it is reported."""
        self.blank += 1

    def pass_over(self, keys: Iterable[str]) -> None:
        """Note keys that are not read."""
        self.unread.update(dict.fromkeys(keys))

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

    def not_read(self) -> list[str]:
        """Name the keys that are not read, in a line; in none when there are none."""
        return [f"Data: {self.name}: not read: {quoted(self.unread, 20)}"] if self.unread else []

    def _listed(self) -> str:
        more = f" (and {self.count - REPORTED_LINES} more)" if self.count > REPORTED_LINES else ""
        return "; ".join(self.first) + more


def is_plain_text(path: Path) -> bool:
    """Return True for plain text, by the file's name, where no format is stated. Raises ConfigError for what is neither, though it may look
    so.
    """
    if suffix_of(path) in {*TABLES, *JSON}:
        return False
    with _opened(path) as file:
        head = file.peek(4096)
    if BEGINS_OBJECTS.match(head) is not None:
        raise ConfigError(
            f"the data {path} would be plain text by its name, but begins with a JSON object; set its format to JSONL or name it .jsonl, "
            "or set its format to Text to learn the JSON itself"
        )
    return True


def refuse_packed(path: Path) -> None:
    """Raise ConfigError for a file whose content can't be read from its beginning to its end, or isn't what its name says."""
    suffix = suffix_of(path)
    if suffix in ARCHIVES:
        raise ConfigError(f"the data {path} is an archive ({suffix}); unpack it, and name its folder")
    if suffix in {PARQUET, *ARROW} and is_compressed(path):
        raise ConfigError(
            f"the data {path} is a compressed {suffix} file, which can't be read as a stream; decompress it ({suffix} files compress their"
            " columns themselves)"
        )
    with contextlib.suppress(OSError), path.open("rb") as file:  # who reads it says why it can't be read
        words = disguise(path, file.read(256))
        if words is not None:
            raise ConfigError(f"the data {path} {words}")


BEGINS_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[")
LAID_OUT = re.compile(rb"(\xef\xbb\xbf)?\s*\{([^\n]*[,\[{:])?[ \t\r]*\n\s*\S")
"""Beginning of an object that goes on after its first line."""
BEGINS_OBJECTS = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{(\s*\"|\}\s*$)")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a data file. Raises ConfigError when it can't be read, also later, or TrainerError for a fault that may pass."""
    try:
        with open_data(path) as file:
            yield file
    except OSError as error:
        raise refusal(f"the data {path} can't be read: {error.strerror}", error) from error


def read_lines(path: Path, broken: Broken) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers; one that is not UTF-8 is broken. Raises ConfigError when the file can't be read."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            broken.at(number)
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                broken.add(number, not_utf8(error))


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
            if sample.unread:
                broken.pass_over(sample.unread)
            yield sample


def paragraph_of(record: dict[str, Any], line: int, *, columns: Mapping[str, str] = NO_COLUMNS) -> Sample | None:
    """The `text` of a record as a paragraph of plain text, None for a blank one. Raises ValueError."""
    name = columns.get("text", "text")
    if name not in record:
        raise ValueError(f"there is no `{name}`, and `format: Text` reads nothing else")
    text = record[name]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"`{name}` is not a string")
    unread = tuple(key for key, value in record.items() if key != name and columns.get(key) != "" and value is not None)
    return Sample(text.strip("\r\n").rstrip(), None, line, unread) if text and text.strip() else None


def read_jsonl(path: Path, broken: Broken, form: Form = sample_of) -> Iterator[AnySample]:
    """Yield a sample for each line that is not blank, or for each object of an array. Raises ConfigError when the file can't be read."""
    with _opened(path) as file:
        head = file.peek(4096)
    if LAID_OUT.match(head) is not None:
        raise ConfigError(
            f"{path}:1: its JSON is laid out over several lines; write one object a line (jq -c . FILE > NEW), or one array of objects (if"
            " they are a list in it: jq .KEY FILE > NEW)"
        )
    if BEGINS_ARRAY.match(head) is not None:
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
            raise ValueError('not valid JSON (the array has ended before; a line that is a list of messages must be {"messages": […]})')
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
            raise ValueError(not_utf8(error)) from error
        self._ended = not read
        self._text = self._text[self._position :] + read
        self._position = 0
