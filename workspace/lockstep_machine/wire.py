"""Lines and frames between two programs over a pair of pipes or a connection: how each end waits, and how much it takes.

Neither end trusts the other: who made a pod's image decides what its Python says. So every line, list and chunk has a limit, and so has
each wait. Python 3.6 reads it, too.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

CHUNK = 1 << 20
SMALL_BYTES = 1 << 16
SILENCE_SECONDS = 60.0
"""Seconds without a word after which the other end counts as gone: the connection may have broken silently."""
BUSY_SECONDS = 5.0
LINE_BYTES_MAX = 1 << 20
BATCH_BYTES = LINE_BYTES_MAX // 2
ENTRIES_MAX = 500_000
LISTING_BYTES_MAX = 64 << 20
BUSY_MAX = 100_000
"""Busy messages in a row, one every 5 seconds: more than any file takes."""
MESSAGE_CHARACTERS_MAX = 2000


class CarryError(Exception):
    """The transfer can't be done, and another try would not help. The message says what and where."""


class Gone(Exception):
    """The other end has ended, or doesn't answer any more. The next try goes on from what it had received."""


class Wire:
    """One JSON value a line, and frames of bytes, over two descriptors."""

    def __init__(self, source: int, sink: int, silence: float = SILENCE_SECONDS) -> None:
        self._source, self._sink, self._silence = source, sink, silence
        os.set_blocking(sink, False)  # else a write that is too large for the pipe never comes back when nobody reads
        self._buffer = bytearray()
        self._heard, self._unsent = 0, b""
        self._wrote_at, self._end = time.monotonic(), float("inf")
        self._encode: Callable[[dict[str, Any]], bytes] = lambda value: json.dumps(value).encode() + b"\n"
        self._decode: Callable[[bytes], Any] = json.loads

    def allow(self, seconds: float) -> None:
        """Set the deadline: everything must be over in so many seconds from now on."""
        self._end = time.monotonic() + seconds

    def seal(self, encode: Callable[[dict[str, Any]], bytes], decode: Callable[[bytes], dict[str, Any]]) -> None:
        """Sign lines by `encode` from now on, and check them by `decode`. Chunks aren't signed; their file's SHA-256 stands in a line."""

        def checked(line: bytes) -> dict[str, Any]:
            try:
                return decode(line)
            except ValueError as error:
                raise CarryError(f"another host says what it has not signed: {error}") from None

        self._encode, self._decode = encode, checked

    def say(self, value: dict[str, Any]) -> None:
        self._write(self._encode(value))

    def busy(self) -> None:
        """Call this now and then during long work, so that the other end goes on waiting."""
        if time.monotonic() - self._wrote_at > BUSY_SECONDS:
            self.say({"busy": True})

    def say_all(self, key: str, items: Iterable[object], first: Mapping[str, object] | None = None) -> None:
        """Send a list, in as many lines as it takes: each has `key`, and all but the last one have "more".

        `first`: what the first one has besides.
        """
        batch: list[object] = []
        size, values = 0, dict(first or {})
        for item in items:
            length = len(json.dumps(item))
            if batch and size + length > BATCH_BYTES:
                self.say({**values, key: batch, "more": True})
                batch, size, values = [], 0, {}
            batch.append(item)
            size += length + 2
        self.say({**values, key: batch})

    def hear(self) -> dict[str, Any]:
        """Next object of the other end. Raises CarryError with its message when it has given up, or when it breaks the protocol; Gone."""
        for _ in range(BUSY_MAX):
            value = self._object()
            if "failed" in value:
                words = value["failed"]
                raise CarryError(
                    words[:MESSAGE_CHARACTERS_MAX] if isinstance(words, str) and words else "the other end has given up without a word"
                )
            if value != {"busy": True}:
                return value
        raise CarryError("the other end only reports that it is busy: the transfer can't be trusted")

    def hear_all(self, key: str) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Items of a list that `say_all` sent, each with the line that it stood in. Raises as `hear` does."""
        count, heard = 0, 0
        while True:
            before = self._heard
            value = self.hear()
            heard += self._heard - before
            items = value.get(key)
            if not isinstance(items, list):
                raise no_protocol(f"{key} is no list")
            count += len(items)
            if count > ENTRIES_MAX or heard > LISTING_BYTES_MAX:
                raise CarryError(
                    f"there are more than {ENTRIES_MAX} files and folders, or their names take more than {LISTING_BYTES_MAX >> 20} MiB:"
                    " copy them in parts, or in an archive"
                )
            for item in items:
                yield item, value
            if value.get("more") is not True:
                return
            if not items:
                raise no_protocol(f"{key} has an empty part")

    def _object(self) -> dict[str, Any]:
        line = self._line()
        try:
            value = self._decode(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise no_protocol(f"it says {line[:80]!r}")
        return value

    def _line(self) -> bytes:
        """Next line, without its end."""
        searched, end = 0, self._buffer.find(b"\n")
        while end < 0 and len(self._buffer) <= LINE_BYTES_MAX:
            searched = len(self._buffer)
            self._fill()
            end = self._buffer.find(b"\n", searched)
        if not 0 <= end <= LINE_BYTES_MAX:
            raise no_protocol(f"a line is longer than {LINE_BYTES_MAX} bytes")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._heard += end
        return line

    def pass_on(self, chunk: bytes) -> None:
        """Send a chunk. A small one goes with what is said next."""
        self._unsent += len(chunk).to_bytes(4, "big") + chunk
        if len(self._unsent) > SMALL_BYTES:
            self._write(b"")

    def frames(self) -> Iterator[bytes]:
        """Chunks until the empty one. Raises CarryError for one that is larger than any giver sends."""
        for size in iter(lambda: int.from_bytes(self._take(4), "big"), 0):
            if size > CHUNK:
                raise no_protocol(f"a chunk has {size} bytes, of at most {CHUNK}")
            yield self._take(size)

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _fill(self) -> None:
        if self._unsent:  # (who waits for an answer has said all)
            self._write(b"")
        seconds = self._patience()
        if not _ready(self._source, select.POLLIN, seconds):
            raise Gone(f"nothing heard for {seconds:.0f} s")
        try:
            data = os.read(self._source, CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            raise Gone(str(error)) from error
        if not data:
            raise Gone("the connection broke")
        self._buffer += data

    def _write(self, data: bytes) -> None:
        view, self._unsent = memoryview(self._unsent + data), b""
        while view:
            try:
                view = view[os.write(self._sink, view) :]
            except BlockingIOError:
                seconds = self._patience()
                if not _ready(self._sink, select.POLLOUT, seconds):
                    raise Gone(f"nothing was taken for {seconds:.0f} s") from None
            except OSError as error:
                raise Gone(str(error)) from error
        self._wrote_at = time.monotonic()

    def _patience(self) -> float:
        """Return the seconds to wait for the other end. Raises Gone once the deadline has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise Gone("the deadline has passed")
        return min(left, self._silence)


class Asker:
    """The other end of a program that goes on for as long as somebody asks for it: what it says, and whether it is still there."""

    def __init__(self, stream: BinaryIO) -> None:
        self.said: set[bytes] = set()
        self._stream, self._heard, self._gone = stream, time.monotonic(), False
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in iter(self._stream.readline, b""):
            with self._news:
                self.said.add(line.strip())
                self._heard = time.monotonic()
                self._news.notify_all()
        self.leave()

    def leave(self, *_: object) -> None:
        """Count the other end as gone."""
        self._gone = True

    @property
    def is_gone(self) -> bool:
        return self._gone or time.monotonic() - self._heard > SILENCE_SECONDS

    def says(self, word: bytes, seconds: float) -> bool:
        """Return True once it has said the word; False after so many seconds, or when it has gone."""
        end = time.monotonic() + seconds
        while word not in self.said and not self.is_gone and time.monotonic() < end:
            with self._news:
                self._news.wait(min(end - time.monotonic(), 0.2))
        return word in self.said


def no_protocol(what: str) -> CarryError:
    return CarryError(f"the other end does not follow the protocol of copies: {what}; check the python3 of the pod's image")


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    """Return True if there is something to read, room to write, or an end of the connection (which select() doesn't report when it waits
    for room).
    """
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(seconds * 1000))
