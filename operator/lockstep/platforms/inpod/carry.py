"""Both ends of `lockstep cp` and `sync`: files from one machine to another over a pair of pipes. One end is a program in a pod.

The giver says what there is, the taker what it has of it, complete or not, with a SHA-256; then only what is missing travels, in chunks,
and the taker compares the SHA-256 of each whole file before it gives it its name. So a broken transfer goes on where it was, nothing is
ever there in half, and memory doesn't grow with the files. An end that hears nothing for a minute gives up; one that is busy (hashing) says
so.

A taker opens folder after folder below its destination without following a link, and gives no file a bit that runs it as somebody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.platforms.inpod.destination import Destination, destination_of
from lockstep.platforms.inpod.entries import DRAFT, Entry, hear_entries, hear_held, hear_plan, stays_below
from lockstep.platforms.inpod.synced import synced
from lockstep_machine.readings import nearest
from lockstep_machine.wire import CHUNK, SILENCE_SECONDS, CarryError, Gone, Wire, no_protocol
from lockstep_spec.senders import Senders

UNANSWERED_FILES = 64
SYNCED_BYTES = 1 << 20
"""Files of this size and more are on the disk before they get their name; a thousand small ones would take minutes that way."""
SYNC_EVERY_BYTES = 256 << 20
"""Bytes between two waits for the disk, so that the last one is short, whatever the file's size: the other end takes a long silence for an
end.
"""


# ---- what there is -----------------------------------------------------------------------------------------------------------------


def entries_below(source: Path, allowed: Callable[[Path], bool] = lambda path: True) -> list[Entry]:
    """The file `source` (its name is "") or all that is below the folder, folders first. A link that stays inside is a link, else it is
    what it leads to.

    Raises CarryError when a link leads to nothing, or to where `allowed` says no.
    """
    real = Path(os.path.realpath(source))
    if not real.exists():
        raise CarryError(f"{source} does not exist")
    if not (real.is_dir() or real.is_file()):
        raise CarryError(f"{source} is neither a file nor a folder")
    return list(_listed(real, real, "", allowed, (str(real),)))


def _listed(root: Path, path: Path, name: str, allowed: Callable[[Path], bool], above: tuple[str, ...]) -> Iterator[Entry]:
    if not allowed(path):
        raise CarryError(f"{path} is outside of the job's volumes")
    state = path.stat()
    if stat.S_ISDIR(state.st_mode):
        yield {"name": name, "dir": True}
        for below in sorted(path.iterdir()):
            if not below.name.startswith(DRAFT):
                yield from _below(root, below, f"{name}/{below.name}" if name else below.name, allowed, above)
    elif stat.S_ISREG(state.st_mode):
        yield {"name": name, "size": state.st_size, "mode": state.st_mode & 0o777, "path": str(path)}


def _below(root: Path, path: Path, name: str, allowed: Callable[[Path], bool], above: tuple[str, ...]) -> Iterator[Entry]:
    if not path.is_symlink():
        yield from _listed(root, path, name, allowed, above)
        return
    target, real = os.readlink(path), Path(os.path.realpath(path))  # noqa: PTH115 (what is written in it, not a Path)
    if stays_below(name, target) and _is_below(root, real):
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


class Stored:
    """Files of this machine that are given, or that were taken and may be given on."""

    def __init__(self, entries: Sequence[Entry], name: object, counts: Entry | None = None) -> None:
        """`name`: of all of it, for the taker. `counts`: what was done. An entry's "sha256" is what its file must still have."""
        self.entries, self.name, self.counts = entries, name, counts or {}


def give(
    wire: Wire,
    source: Path,
    allowed: Callable[[Path], bool] = lambda path: True,
    passed: Callable[[int], None] = lambda size: None,
    expected: Callable[[int], None] = lambda size: None,
) -> Entry:
    """Send `source`, and return counts of what was done. `expected` gets the number of bytes to send, `passed` of those that were sent."""
    name = Path(os.path.abspath(source)).name  # noqa: PTH100 (a link by its own name)
    given = Stored(entries_below(source, allowed), name)
    offer(wire, given)
    return give_all(wire, given, passed, expected)


def offer(wire: Wire, given: Stored) -> None:
    shown = ({key: value for key, value in entry.items() if key != "path"} for entry in given.entries)
    wire.say_all("entries", shown, {"name": given.name})


def give_all(
    wire: Wire, given: Stored, passed: Callable[[int], None] = lambda size: None, expected: Callable[[int], None] = lambda size: None
) -> Entry:
    """Send these files, which were offered, and return what `give` does."""
    files = {number: entry for number, entry in enumerate(given.entries) if "size" in entry}
    present = hear_held(wire, files)
    plan, hashes = [], {}
    for number, entry in files.items():
        have, digest, complete = present.get(number, (0, "", False))
        begun = _hashed_path(Path(entry["path"]), have, wire) if have or complete else None
        same = begun is not None and begun.hexdigest() == digest
        if not (same and complete):
            plan.append((number, have if same else 0))
            hashes[number] = begun if same else hashlib.sha256()
    wire.say_all("plan", plan)
    missing = sum(files[number]["size"] - offset for number, offset in plan)
    expected(missing)
    wire.hear()
    unanswered = 0
    for number, offset in plan:
        _give_file(wire, files[number], offset, hashes[number], passed)
        unanswered += 1
        while unanswered > UNANSWERED_FILES:  # (answers that nobody reads would stop both ends in the end)
            wire.hear()
            unanswered -= 1
    for _ in range(unanswered):
        wire.hear()
    if "ended" not in wire.hear():
        raise no_protocol("it doesn't say that it has ended")
    return _counts(files, plan, missing)


def _counts(files: Mapping[int, Entry], plan: list[tuple[int, int]], missing: int) -> Entry:
    return {"files": len(files), "sent": len(plan), "bytes": missing, "resumed": sum(1 for _, offset in plan if offset)}


def _give_file(wire: Wire, entry: Entry, offset: int, digest: Any, passed: Callable[[int], None]) -> None:
    """Send a file from there on, as many bytes as were listed. Raises CarryError unless it is still what was listed."""
    left = entry["size"] - offset
    with Path(entry["path"]).open("rb") as file:
        file.seek(offset)
        for chunk in _chunks(file, left):
            left -= len(chunk)
            digest.update(chunk)
            wire.pass_on(chunk)
            passed(len(chunk))
        changed = left or file.read(1)
    wire.pass_on(b"")
    if changed or entry.get("sha256") not in (None, digest.hexdigest()):
        fault = f"{entry['path']} was changed while it was sent, or the disk of {socket.gethostname()} is bad: try again"
        wire.say({"failed": fault})
        raise CarryError(fault)
    wire.say({"sha256": digest.hexdigest()})


def _hashed_path(path: Path, size: int, wire: Wire) -> Any:
    with path.open("rb") as file:
        return _hashed(file, size, wire)


def _hashed(file: BinaryIO, size: int, wire: Wire) -> Any:
    """SHA-256 of the first `size` bytes."""
    digest = hashlib.sha256()
    for chunk in _chunks(file, size):
        digest.update(chunk)
        wire.busy()
    return digest


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Next bytes of a file: so many, or until its end."""
    chunk = file.read(min(CHUNK, size))
    while chunk:
        yield chunk
        size -= len(chunk)
        chunk = file.read(min(CHUNK, size))


# ---- taking ------------------------------------------------------------------------------------------------------------------------


def take(
    wire: Wire,
    to: str,
    allowed: Callable[[Path], bool] = lambda path: True,
    passed: Callable[[int], None] = lambda size: None,
    expected: Callable[[int], None] = lambda size: None,
    widen: int = 0o600,
    name: str | None = None,
    sender: Entry | None = None,
    sync: Entry | None = None,
) -> Stored:
    """Receive to `to` (`destination_of`), and return what came. `expected` gets the number of bytes to come, `passed` of those that came.
    `widen`: mode bits that every file gets.

    `name`: what lands in a target that is a folder to put it into; None: the giver's own name for it, which must be one component.
    `sender`: who sends it, for the records of a volume. Raises CarryError where another folder sent a file that would be another one then.
    `sync`: what a sync asks for (`synced`).
    """
    entries, offered = hear_entries(wire)
    target = destination_of(to, offered if name is None else name, folder="size" not in entries[0], allowed=allowed)
    with contextlib.closing(target), synced(wire, target, entries, sync) as entries:
        if not entries:
            return Stored([], offered)
        files = {number: entry for number, entry in enumerate(entries) if "size" in entry}
        held: list[tuple[int, int, str, bool]] = []
        begun: dict[int, Any] = {}
        for number, (digest, size, whole) in _had_of(target, files, wire):
            held.append((number, size, digest.hexdigest(), whole))
            if not whole:
                begun[number] = digest
        wire.say_all("have", held)
        plan = hear_plan(wire, files, {number: size for number, size, _, whole in held if not whole})
        missing = sum(files[number]["size"] - offset for number, offset in plan)
        _check_space(target.base, missing)
        expected(missing)
        comes = dict(plan)
        digests = {number: digest for number, _, digest, whole in held if whole and number not in comes}
        if len(comes) + len(digests) != len(files):
            raise no_protocol("it doesn't plan to send all that is missing")
        origins = {} if sender is None else _origins(target, files, sender["origin"])
        if sender is not None and not sender["force"]:
            words = Senders().refusal([origins[number] for number in comes])
            if words:
                raise CarryError(f"{words}: {sender['line']}")
        for entry in entries:
            os.close(target.folder(entry["name"]) if entry.get("dir") else target.holder(entry["name"])[0])
        wire.say({"ready": True})
        mask = os.umask(0o077)
        os.umask(mask)
        for number, offset in plan:
            hashed = begun[number] if offset else hashlib.sha256()
            _take_file(wire, target, files[number], offset, hashed, (files[number]["mode"] & 0o777 & ~mask) | widen, passed)
            digests[number] = hashed.hexdigest()
            wire.say({"done": number})
        for entry in entries:
            if "link" in entry:
                _link(target, entry["name"], entry["link"], allowed)
        if sender is not None:
            Senders().note(origins, comes, [os.path.realpath(root) for root in sender["roots"]])
    counts = _counts(files, plan, missing)
    wire.say({"ended": counts})
    given = [{**entry, "path": str(target.path(entry["name"])), "sha256": digests.get(at)} for at, entry in enumerate(entries)]
    return Stored(given, offered, counts)


def _origins(target: Destination, files: Mapping[int, Entry], origin: str) -> dict[int, tuple[str, str]]:
    """Path of each file here, and where it comes from, as HOST:PATH."""
    base = Path(os.path.realpath(target.base))
    names = {number: entry["name"] for number, entry in files.items()}
    return {
        number: (str(base / target.path(name).relative_to(target.base)), f"{origin}/{name}" if name else origin)
        for number, name in names.items()
    }


def draft_name(name: str) -> str:
    """Name of the draft: the same at every try, and never too long."""
    return DRAFT + hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _had_of(target: Destination, files: Mapping[int, Entry], wire: Wire) -> Iterator[tuple[int, tuple[Any, int, bool]]]:
    for number, entry in files.items():
        try:
            holder, name = target.holder(entry["name"], make=False)
        except FileNotFoundError:
            continue
        try:
            had = _had(holder, name, target.path(entry["name"]), entry["size"], wire)
        finally:
            os.close(holder)
        if had is not None:
            yield number, had


def _had(holder: int, name: str, place: Path, size: int, wire: Wire) -> tuple[Any, int, bool] | None:
    """SHA-256 of the part of a file that exists already, the size of that, and whether it has its name; None when there is none."""
    draft = draft_name(name)
    state, begun = _state(holder, name), _state(holder, draft)
    if state is not None and stat.S_ISDIR(state.st_mode):
        raise CarryError(f"{place} is a folder, and a file must go there")
    is_begun = begun is not None and stat.S_ISREG(begun.st_mode) and begun.st_nlink == 1
    complete = not is_begun and state is not None and stat.S_ISREG(state.st_mode) and state.st_size == size
    if not complete and not is_begun:
        return None
    descriptor = os.open(name if complete else draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=holder)
    with os.fdopen(descriptor, "rb") as file:
        have = min(os.fstat(descriptor).st_size, size)
        return _hashed(file, have, wire), have, complete


def _state(holder: int, name: str) -> os.stat_result | None:
    """State of the entry itself, also of a link; None when there is none."""
    try:
        return os.stat(name, dir_fd=holder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _check_space(target: Path, missing: int) -> None:
    existing = nearest(target)
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise CarryError(f"{existing} has {free / 1e9:.2f} GB free, and {missing / 1e9:.2f} GB are needed: free some space there first")


def _take_file(wire: Wire, target: Destination, entry: Entry, offset: int, digest: Any, mode: int, passed: Callable[[int], None]) -> None:
    place = target.path(entry["name"])
    holder, name = target.holder(entry["name"])
    draft, size, synced = draft_name(name), offset, offset
    try:
        with os.fdopen(_opened_draft(holder, draft), "r+b", buffering=0) as file:
            _lock(file.fileno(), place.with_name(draft), wire)
            if os.fstat(file.fileno()).st_size < offset:
                raise CarryError(f"{place.with_name(draft)} was changed by somebody else: try again")
            file.truncate(offset)
            file.seek(offset)
            for chunk in wire.frames():
                size += len(chunk)
                if size > entry["size"]:
                    raise CarryError(f"{place}: more than the expected {entry['size']} bytes arrived")
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) :]
                digest.update(chunk)
                passed(len(chunk))
                if size - synced >= SYNC_EVERY_BYTES:
                    os.fsync(file.fileno())
                    synced = size
            if wire.hear().get("sha256") != digest.hexdigest() or size != entry["size"]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=holder)
                raise CarryError(f"{place} was damaged on the way: its size or SHA-256 is not the sender's; try again")
            with contextlib.suppress(PermissionError):  # (a draft that somebody else began)
                os.fchmod(file.fileno(), mode)
            if size >= SYNCED_BYTES:
                os.fsync(file.fileno())
            os.replace(draft, name, src_dir_fd=holder, dst_dir_fd=holder)
    finally:
        os.close(holder)


def _opened_draft(holder: int, draft: str) -> int:
    """Open the draft that an earlier try began, or a new file: never a device, a FIFO or another file's second name that somebody has put
    there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # (a link, a socket)
        descriptor = os.open(draft, flags, 0o660, dir_fd=holder)
        state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
            return descriptor
        os.close(descriptor)
    os.unlink(draft, dir_fd=holder)
    return os.open(draft, flags | os.O_EXCL, 0o660, dir_fd=holder)


def _lock(descriptor: int, draft: Path, wire: Wire) -> None:
    """Lock the draft. An earlier transfer whose connection broke may not have noticed it yet: it gives up after its own silence."""
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


def _link(target: Destination, name: str, link: str, allowed: Callable[[Path], bool]) -> None:
    place, root = target.path(name), target.path("")
    leads = Path(os.path.realpath(place.parent / link))
    if not _is_below(Path(os.path.realpath(root)), leads) or not allowed(leads):  # (by a link that was there before)
        raise CarryError(f"{place} would be a link to {link}, outside of {root}")
    holder, last = target.holder(name)
    draft = draft_name(last)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=holder)
        os.symlink(link, draft, dir_fd=holder)
        os.replace(draft, last, src_dir_fd=holder, dst_dir_fd=holder)
    finally:
        os.close(holder)


# ---- in the pod --------------------------------------------------------------------------------------------------------------------


def words_of(error: Exception) -> str:
    """Return an error as people read it, with the file that it is about and without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def below(roots: Sequence[str]) -> Callable[[Path], bool]:
    """Return whether a path is one of these folders, or below one, as a function of it."""
    real = [Path(os.path.realpath(root)) for root in roots]
    return lambda path: any(_is_below(root, path) for root in real)


@contextlib.contextmanager
def failures_told(wire: Wire) -> Iterator[None]:
    """Tell the other end why this one gives up, and exit with the same words."""
    try:
        yield
    except (CarryError, OSError) as error:
        with contextlib.suppress(Gone):
            wire.say({"failed": words_of(error)})
        sys.exit(words_of(error))
    except Gone as error:
        sys.exit(str(error))


def serve(request: Entry, wire: Wire) -> None:
    """Run the pod's end: {"give": path} or {"take": path}, with the roots that paths must be below; {"syncs": True} takes again and again,
    as each next line asks.

    What comes to a pod is its group's, too, since a pod of another transport has another user. "ownUmask": this is a person's own machine,
    whose umask counts.
    """
    allowed = below(request["roots"])
    own = request.get("ownUmask", False)
    if not own:
        os.umask(0o002)
    with failures_told(wire):
        if "give" in request:
            give(wire, Path(request["give"]), allowed)
        elif "take" in request:
            take(wire, request["take"], allowed, widen=0o600 if own else 0o660, sender=request.get("sender"))
        while "syncs" in request and select.select([0], [], []):  # (however long the next one takes)
            sync = wire.hear()
            take(wire, str(Path(sync["take"])), allowed, widen=0, sync=sync)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), Wire(0, 1))
