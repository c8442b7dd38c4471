"""Files from one machine to another over a pair of pipes: both ends of `lockstep cp`. One end runs in a pod, by its own Python (3.10 or newer),
as text; so nothing is imported but the standard library.

The giver says what there is, the taker what it has of it, complete or not, with a SHA-256; then only what is missing travels, in chunks, and the
taker compares the SHA-256 of each whole file before it gives it its name. So a broken transfer goes on where it was, nothing is ever there in
half, and memory doesn't grow with the files. An end that hears nothing for a minute gives up; one that is busy (hashing) says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
SILENCE_SECONDS = 60.0
BUSY_SECONDS = 5.0
UNANSWERED_FILES = 64
SYNCED_BYTES = 1 << 20
"""Files of this size and more are on the disk before they get their name; a thousand small ones would take minutes that way."""
SYNC_EVERY_BYTES = 256 << 20
"""So that the last wait for the disk is short, whatever the file's size: the other end takes a long silence for an end."""
DRAFT = ".lockstep-cp-"
Entry = dict[str, Any]


class CarryError(Exception):
    """The transfer can't be done, and trying again would not help. The message says what and where."""


class Gone(Exception):
    """The other end has ended, or says nothing any more. What it had received is there at the next try."""


class Wire:
    """One JSON value a line, and frames of bytes, over two descriptors."""

    def __init__(self, source: int, sink: int, silence: float = SILENCE_SECONDS) -> None:
        self._source, self._sink, self._silence = source, sink, silence
        os.set_blocking(sink, False)  # else a write that is too large for the pipe never comes back when nobody reads
        self._buffer = bytearray()
        self._said = time.monotonic()

    def say(self, value: object) -> None:
        self._write(json.dumps(value).encode() + b"\n")

    def busy(self) -> None:
        """Call this now and then during long work, so that the other end goes on waiting."""
        if time.monotonic() - self._said > BUSY_SECONDS:
            self.say({"busy": True})

    def hear(self) -> Any:
        """The other end's next value. Raises CarryError with its words when it has given up, Gone."""
        while True:
            while (end := self._buffer.find(b"\n")) < 0:
                self._fill()
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            value = json.loads(line)
            if isinstance(value, dict) and "failed" in value:
                raise CarryError(value["failed"])
            if value != {"busy": True}:
                return value

    def pass_on(self, chunk: bytes) -> None:
        self._write(len(chunk).to_bytes(4, "big") + chunk)

    def frames(self) -> Iterator[bytes]:
        """Chunks until the empty one."""
        while size := int.from_bytes(self._take(4), "big"):
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
        view = memoryview(data)
        while view:
            if not _ready(self._sink, select.POLLOUT, self._silence):
                raise Gone(f"nothing was taken for {self._silence:.0f} s")
            try:
                view = view[os.write(self._sink, view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Gone(str(error)) from error
        self._said = time.monotonic()


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    """Whether there is something to read, or room to write, or an end to hear of (which select() doesn't wake for when it waits for room)."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(seconds * 1000))


# ---- what there is -----------------------------------------------------------------------------------------------------------------


def listed(source: Path, allowed: Callable[[Path], bool] = lambda path: True) -> list[Entry]:
    """The file `source` (its name is "") or all that is below the folder, folders first. A link that stays inside is a link, else it is what it leads to.

    Raises CarryError when a link leads to nothing, or to where `allowed` says no.
    """
    real = Path(os.path.realpath(source))
    if not real.exists():
        raise CarryError(f"{source} does not exist")
    return list(_listed(real, real, "", allowed, (str(real),)))


def _listed(root: Path, path: Path, name: str, allowed: Callable[[Path], bool], above: tuple[str, ...]) -> Iterator[Entry]:
    if not allowed(path):
        raise CarryError(f"{path} is outside of the job's volumes")
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        yield {"name": name, "dir": True}
        for below in sorted(path.iterdir()):
            if not below.name.startswith(DRAFT):
                yield from _below(root, below, f"{name}/{below.name}" if name else below.name, allowed, above)
    elif stat.S_ISREG(found.st_mode):
        yield {"name": name, "size": found.st_size, "mode": found.st_mode & 0o777, "path": str(path)}


def _below(root: Path, path: Path, name: str, allowed: Callable[[Path], bool], above: tuple[str, ...]) -> Iterator[Entry]:
    if not path.is_symlink():
        yield from _listed(root, path, name, allowed, above)
        return
    target, real = os.readlink(path), Path(os.path.realpath(path))  # noqa: PTH115 (what is written in it, not a Path)
    if not Path(target).is_absolute() and _is_below(root, real):
        yield {"name": name, "link": target}
    elif not real.exists():
        raise CarryError(f"{path} is a link to {target}, which does not exist: remove it, or make what it leads to")
    elif str(real) in above:
        raise CarryError(f"{path} is a link to a folder that it is in: remove it")
    else:
        yield from _listed(root, real, name, allowed, (*above, str(real)))


def _is_below(root: Path, path: Path) -> bool:
    return root == path or root in path.parents


# ---- giving ------------------------------------------------------------------------------------------------------------------------


def give(
    wire: Wire,
    source: Path,
    allowed: Callable[[Path], bool] = lambda path: True,
    passed: Callable[[int], None] = lambda size: None,
    expected: Callable[[int], None] = lambda size: None,
) -> Entry:
    """Send `source`. `expected` is told how many bytes there are to send, `passed` of those that were. What the other end says it did: counts."""
    entries = listed(source, allowed)
    shown = [{key: value for key, value in entry.items() if key != "path"} for entry in entries]
    wire.say({"name": Path(os.path.abspath(source)).name, "entries": shown})  # noqa: PTH100 (a link by its own name)
    plan, hashes = [], {}
    for number, (have, digest, complete) in wire.hear()["have"].items():
        entry = entries[int(number)]
        begun = _hashed(Path(entry["path"]), have, wire) if have or complete else None
        same = begun is not None and begun.hexdigest() == digest
        if not (same and complete):
            plan.append([int(number), have if same else 0])
            hashes[int(number)] = begun if same else hashlib.sha256()
    wire.say({"plan": plan})
    expected(sum(entries[number]["size"] - offset for number, offset in plan))
    wire.hear()
    unanswered = 0
    for number, offset in plan:
        _give_file(wire, Path(entries[number]["path"]), entries[number]["size"], offset, hashes[number], passed)
        unanswered += 1
        while unanswered > UNANSWERED_FILES:  # (answers that nobody reads would stop both ends in the end)
            wire.hear()
            unanswered -= 1
    for _ in range(unanswered):
        wire.hear()
    return dict(wire.hear()["ended"])


def _give_file(wire: Wire, path: Path, size: int, offset: int, digest: Any, passed: Callable[[int], None]) -> None:
    left = size - offset
    with path.open("rb") as file:
        file.seek(offset)
        while left and (chunk := file.read(min(CHUNK, left))):
            digest.update(chunk)
            wire.pass_on(chunk)
            left -= len(chunk)
            passed(len(chunk))
        longer = bool(file.read(1))
    wire.pass_on(b"")
    changed = left or longer
    wire.say({"failed": f"{path} was changed while it was sent: try again"} if changed else {"sha256": digest.hexdigest()})
    if changed:
        raise CarryError(f"{path} was changed while it was sent: try again")


def _hashed(path: Path, size: int, wire: Wire) -> Any:
    """Of the first `size` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size and (chunk := file.read(min(CHUNK, size))):
            digest.update(chunk)
            size -= len(chunk)
            wire.busy()
    return digest


# ---- taking ------------------------------------------------------------------------------------------------------------------------


def take(
    wire: Wire,
    to: str,
    allowed: Callable[[Path], bool] = lambda path: True,
    passed: Callable[[int], None] = lambda size: None,
    expected: Callable[[int], None] = lambda size: None,
    widen: int = 0o600,
) -> Entry:
    """Receive to `to` (`destination`). `expected` is told how many bytes will come, `passed` of those that came. `widen`: mode bits that every file gets."""
    heard = wire.hear()
    entries: list[Entry] = heard["entries"]
    target = destination(to, heard["name"], folder="size" not in entries[0])
    places = {number: inside(target, entry["name"], allowed) for number, entry in enumerate(entries)}
    files = {number: entry for number, entry in enumerate(entries) if "size" in entry}
    begun: dict[int, Any] = {}
    wire.say({"have": {number: _had(places[number], entry["size"], wire, begun, number) for number, entry in files.items()}})
    plan: list[tuple[int, int]] = wire.hear()["plan"]
    missing = sum(files[number]["size"] - offset for number, offset in plan)
    _check_space(target, missing)
    expected(missing)
    for number, entry in enumerate(entries):
        folder = places[number] if entry.get("dir") else places[number].parent
        folder.mkdir(parents=True, exist_ok=True)
    wire.say({"ready": True})
    for number, offset in plan:
        digest = begun[number] if offset else hashlib.sha256()
        _take_file(wire, places[number], offset, digest, files[number]["mode"] | widen, passed)
        wire.say({"done": number})
    for number, entry in enumerate(entries):
        if "link" in entry:
            _link(places[number], entry["link"], target, allowed)
    ended = {"files": len(files), "sent": len(plan), "bytes": missing, "resumed": sum(1 for _, offset in plan if offset)}
    wire.say({"ended": ended})
    return ended


def destination(target: str, name: str, *, folder: bool) -> Path:
    """Where `name` goes: below a target that ends with a slash, and a file into a folder that is there; else the target is its new name."""
    path = Path(target)
    into = target.endswith(("/", "/.", "/..")) or target in (".", "..") or (not folder and path.is_dir())
    return path / name if into else path


def inside(target: Path, name: str, allowed: Callable[[Path], bool]) -> Path:
    """Raises CarryError when `name` below `target` would be elsewhere: by .., or by a link on the way."""
    place = target / name if name else target
    holder = place if place.is_dir() else place.parent
    if Path(name).is_absolute() or ".." in Path(name).parts or not allowed(Path(os.path.realpath(holder))):
        raise CarryError(f"{place} is outside of the job's volumes")
    if name and not _is_below(Path(os.path.realpath(target)), Path(os.path.realpath(place.parent))):
        raise CarryError(f"{place} would be outside of {target}, by a link on the way")
    return place


def draft_of(place: Path) -> Path:
    """Where a file is until it is complete: the same at every try, and never too long a name."""
    return place.with_name(DRAFT + hashlib.sha256(os.fsencode(place.name)).hexdigest()[:16])


def _had(place: Path, size: int, wire: Wire, begun: dict[int, Any], number: int) -> tuple[int, str, bool]:
    """(bytes, their SHA-256, whether it has its name) of what is there of a file already."""
    if place.is_dir():
        raise CarryError(f"{place} is a folder where a file would have to be")
    draft = draft_of(place)
    complete = not draft.is_file() and place.is_file() and not place.is_symlink() and place.stat().st_size == size
    if not complete and not draft.is_file():
        return 0, "", False
    there = place if complete else draft
    have = min(there.stat().st_size, size)
    begun[number] = _hashed(there, have, wire)
    return have, begun[number].hexdigest(), complete


def _check_space(target: Path, missing: int) -> None:
    there = target
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if missing > free:
        raise CarryError(f"{missing / 1e9:.2f} GB are to come, and {there} has {free / 1e9:.2f} GB free: make room there first")


def _take_file(wire: Wire, place: Path, offset: int, digest: Any, mode: int, passed: Callable[[int], None]) -> None:
    draft, size, synced = draft_of(place), offset, offset
    with os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT, 0o660), "r+b", buffering=0) as file:
        _lock(file.fileno(), draft, wire)
        file.truncate(offset)
        file.seek(offset)
        for chunk in wire.frames():
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]
            digest.update(chunk)
            size += len(chunk)
            passed(len(chunk))
            if size - synced >= SYNC_EVERY_BYTES:
                os.fsync(file.fileno())
                synced = size
        if wire.hear()["sha256"] != digest.hexdigest():
            draft.unlink(missing_ok=True)
            raise CarryError(f"{place} was damaged on the way: its SHA-256 is not the sender's; try again")
        with contextlib.suppress(PermissionError):  # (a draft that somebody else began)
            os.fchmod(file.fileno(), mode)
        if size >= SYNCED_BYTES:
            os.fsync(file.fileno())
        draft.replace(place)


def _lock(descriptor: int, draft: Path, wire: Wire) -> None:
    """An earlier transfer whose connection broke may not know it yet: it gives up after its own silence."""
    end = time.monotonic() + 1.5 * SILENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise CarryError(f"another transfer is writing {draft}: wait for its end") from None
            wire.busy()
            time.sleep(0.5)
        except OSError:  # a file system without locks
            return


def _link(place: Path, target: str, root: Path, allowed: Callable[[Path], bool]) -> None:
    leads = Path(os.path.realpath(place.parent / target))
    if Path(target).is_absolute() or not _is_below(Path(os.path.realpath(root)), leads) or not allowed(leads):
        raise CarryError(f"{place} would be a link to {target}, outside of {root}")
    draft = draft_of(place)
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(place)


# ---- in the pod --------------------------------------------------------------------------------------------------------------------


def serve(request: Entry, wire: Wire) -> None:
    """The pod's end: {"give": path} or {"take": path}, with the roots that paths must be below."""
    roots = [Path(os.path.realpath(root)) for root in request["roots"]]

    def allowed(path: Path) -> bool:
        return any(_is_below(root, path) for root in roots)

    os.umask(0o002)
    try:
        if "give" in request:
            give(wire, Path(request["give"]), allowed)
        else:
            take(wire, request["take"], allowed, widen=0o660)
    except (CarryError, OSError) as error:
        with contextlib.suppress(Gone):
            wire.say({"failed": str(error)})
        sys.exit(str(error))
    except Gone as error:
        sys.exit(str(error))


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), Wire(0, 1))
