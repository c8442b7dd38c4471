"""Protocol of `lockstep cp`: what its two ends say to each other over a pair of pipes, and how each checks what it hears.

Neither end trusts the other: who made a pod's image decides what its Python says. So every line, list and file has a limit, every value is
checked before it is used, and a name leads only to where the person at the keyboard said.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

CHUNK = 1 << 20
SMALL_BYTES = 1 << 16
SILENCE_SECONDS = 60.0
BUSY_SECONDS = 5.0
LINE_BYTES_MAX = 1 << 20
BATCH_BYTES = LINE_BYTES_MAX // 2
ENTRIES_MAX = 500_000
LISTING_BYTES_MAX = 64 << 20
NAME_BYTES_MAX = 4096
DEPTH_MAX = 200
BUSY_MAX = 100_000
"""Busy messages in a row, one every 5 seconds: more than any file takes."""
MESSAGE_CHARACTERS_MAX = 2000
DRAFT = ".lockstep-cp-"
"""Beginning of the names of files that are not complete yet."""
Entry = dict[str, Any]


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
        self._wrote_at = time.monotonic()

    def say(self, value: Entry) -> None:
        self._write(json.dumps(value).encode() + b"\n")

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
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise no_protocol(f"it says {line[:80]!r}") from None
        if not isinstance(value, dict):
            raise no_protocol(f"it says {line[:80]!r}")
        return value

    def _line(self) -> bytes:
        """Next line, without its end."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            if len(self._buffer) > LINE_BYTES_MAX:
                raise no_protocol(f"a line is longer than {LINE_BYTES_MAX} bytes")
            searched = len(self._buffer)
            self._fill()
        if end > LINE_BYTES_MAX:
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
        while size := int.from_bytes(self._take(4), "big"):
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
        if not _ready(self._source, select.POLLIN, self._silence):
            raise Gone(f"nothing heard for {self._silence:.0f} s")
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
                if not _ready(self._sink, select.POLLOUT, self._silence):
                    raise Gone(f"nothing was taken for {self._silence:.0f} s") from None
            except OSError as error:
                raise Gone(str(error)) from error
        self._wrote_at = time.monotonic()


def no_protocol(what: str) -> CarryError:
    return CarryError(f"the other end does not follow the protocol of copies: {what}; check the python3 of the pod's image")


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    """Return True if there is something to read, room to write, or an end of the connection (which select() doesn't report when it waits
    for room).
    """
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(seconds * 1000))


def stays_below(name: str, target: str) -> bool:
    """Return True if a link `name` to `target` can't lead above the folder that `name` counts from: ".." only at its beginning, and no more
    of them than `name` has folders. One in the middle would go up from wherever another link has led.
    """
    parts = target.split("/")
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return target != "" and not target.startswith("/") and ups <= name.count("/") and ".." not in parts[ups:]


def hear_held(wire: Wire, files: Mapping[int, Entry]) -> dict[int, tuple[int, str, bool]]:
    """Map of a file's number to what the taker has of it: bytes, their SHA-256, and whether it has its name. Raises CarryError."""
    held: dict[int, tuple[int, str, bool]] = {}
    for item, _ in wire.hear_all("have"):
        number, have, digest, complete = item if isinstance(item, list) and len(item) == 4 else (None, None, None, None)
        if not (_is_count(number) and number in files and number not in held and _is_count(have) and have <= files[number]["size"]):
            raise no_protocol("it has what wasn't offered")
        held[number] = (have, str(digest), complete is True)
    return held


def hear_entries(wire: Wire) -> tuple[list[Entry], object]:
    """Entries that the giver has, the file or folder itself first, and its name for that. Raises CarryError unless all of them can be
    taken.
    """
    entries: list[Entry] = []
    offered: object = None
    names: set[str] = set()
    for item, line in wire.hear_all("entries"):
        entry = _entry_of(item, first=not entries)
        if entry["name"] in names:
            raise no_protocol(f"it has {entry['name']!r} twice")
        if entries and "dir" not in entries[0]:
            raise no_protocol("there is more than the one file")
        offered = line.get("name") if not entries else offered
        names.add(entry["name"])
        entries.append(entry)
    if not entries:
        raise no_protocol("it has nothing")
    return entries, offered


def _entry_of(item: object, *, first: bool) -> Entry:
    """A file ("size", "mode"), folder ("dir") or link ("link"), and nothing else of what was sent. Raises CarryError."""
    entry = item if isinstance(item, dict) else {}
    name, link, size, mode = (entry.get(key) for key in ("name", "link", "size", "mode"))
    if not isinstance(name, str) or (name == "") != first or (name and not is_plain(name)):
        raise CarryError(f"{shown(name)} would be outside of the target: no part of a name may be empty, '.', '..' or a draft's")
    if entry.get("dir") is True and "size" not in entry and "link" not in entry:
        return {"name": name, "dir": True}
    if _is_count(size) and _is_count(mode) and "link" not in entry and "dir" not in entry:
        return {"name": name, "size": size, "mode": mode}
    if not first and isinstance(link, str) and "size" not in entry and "dir" not in entry:
        if not (_fits(link) and stays_below(name, link)):
            raise CarryError(f"{name!r} would be a link to {link[:200]!r}, outside of the target")
        return {"name": name, "link": link}
    raise no_protocol(f"{name[:200]!r} is neither a file nor a folder nor a link")


def is_plain(name: str) -> bool:
    """Return True if a relative path has only components that are names of files, and none of a draft."""
    parts = name.split("/")
    return _fits(name) and len(parts) <= DEPTH_MAX and not any(part in {"", ".", ".."} or part.startswith(DRAFT) for part in parts)


def shown(name: object) -> str:
    return repr(name[:200]) if isinstance(name, str) else f"something of type {type(name).__name__}"


def _fits(path: str) -> bool:
    """Return True if the system takes the path at all."""
    try:
        return "\0" not in path and len(os.fsencode(path)) <= NAME_BYTES_MAX
    except ValueError:  # (half of a surrogate pair)
        return False


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def hear_plan(wire: Wire, files: Mapping[int, Entry], begun: Mapping[int, Any]) -> list[tuple[int, int]]:
    """Number and offset of every file that will come: from its beginning, or from the end of what the taker has. Raises CarryError."""
    plan: dict[int, int] = {}
    for item, _ in wire.hear_all("plan"):
        number, offset = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not (_is_count(number) and number in files and number not in plan and _is_count(offset)):
            raise no_protocol("it plans to send what it didn't offer")
        if offset and not (number in begun and offset == begun[number].size):
            raise no_protocol("it plans to go on where nothing was begun")
        plan[number] = offset
    return list(plan.items())
