"""Fetch what a name stands for into a folder, once a volume.

A file gets its name when its digest is right and its bytes are durable, and the folder gets its name last. So whoever is killed in the
middle goes on where it was, at the byte, and nothing half-written has the name of what is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

from lockstep_spec.files import make_directory
from lockstep_spec.modelnames import FETCHED
from lockstep_spec.words import decimal_size, duration
from lockstep_train.base.errors import ConfigError, TrainerError, refusal
from lockstep_train.base.limits import Say
from lockstep_train.fetch.folders import (
    PART,
    Target,
    commit_folder,
    free_bytes,
    one_at_a_time,
    prepare_partial,
    remember_revision,
    remembered_revision,
    target_in,
    whole_record,
)
from lockstep_train.fetch.hub import is_offline
from lockstep_train.fetch.remote import Cancelled, Choose, MayPass, Remote, RemoteFile, everything

T = TypeVar("T")
TRANSFERS = 8
"""Transfers at once. One connection seldom fills a link."""
ATTEMPTS = 6
BACKOFF_SECONDS = 1.0
"""First wait, doubled with each attempt that brought nothing: half a minute in all."""
LONGEST_WAIT_SECONDS = 300.0
"""Longest wait, however long a server asks to be left alone. The hub counts requests by five minutes."""
SHORT_WAIT_SECONDS = 10.0
"""Longest wait where there is another answer."""
RESERVE_BYTES = 64 << 20
"""Bytes left free on the volume."""
TICK_SECONDS = 1.0
FIRST_SECONDS = 5.0
"""Seconds until the first line of progress."""
EVERY_SECONDS = 30.0
"""Seconds between lines of progress, which come only while bytes come: a line is taken for a sign of life."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MOVED = frozenset({errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ESTALE})
"""Errors of a process whose folder another has finished, renamed or removed."""


@dataclass(frozen=True)
class Fetched:
    folder: Path
    pin: str


def pin_of(remote: Remote, revision: str | None, cache: Path, say: Say) -> str:
    """Resolve the commit that a revision stands for now; without a network, the one that it stood for when it was fetched into `cache`, and
    `say` tells.

    Raises ConfigError for a wrong name, revision or token, and TrainerError where nobody can be asked.
    """
    if revision is not None and remote.is_pin(revision):
        return revision
    before = remembered_revision(cache, remote.kind, remote.name, revision)
    if is_offline():
        if before is None:
            raise ConfigError(
                f"{remote.name}{_at(revision)} is not in {cache / remote.kind}, and HF_HUB_OFFLINE is set; fetch it with: lockstep"
                " model get"
            )
        return before
    try:
        patience = (ATTEMPTS, LONGEST_WAIT_SECONDS) if before is None else (2, SHORT_WAIT_SECONDS)
        return _with_patience(lambda: remote.resolve(revision), say, *patience)
    except MayPass as problem:
        if before is None:
            raise TrainerError(
                f"{problem}; check that the job can reach it (proxy, HF_ENDPOINT), or fetch it ahead of time: lockstep model get"
            ) from problem
        say(f"{problem}. Going on with {remote.name}{_at(revision)} as it was when it was fetched: {before}")
        return before


def fetch(
    remote: Remote,
    pin: str,
    cache: Path,
    say: Say,
    *,
    choose: Choose = everything,
    part: str = "",
    to: Path | None = None,
    revision: str | None = None,
) -> Fetched:
    """Fetch the remote's files at `pin` into a folder, whole. What is there already is not requested again.

    `choose`: which files; another choice than the usual one has a `part` of its own. `to`: a folder instead of that in the cache.
    `revision`: what people call the pin, remembered for starts without a network.

    Raises ConfigError for what can't work, TrainerError for a network, a server or a volume with which it may work later.
    """
    target = Target(to, pin) if to is not None else target_in(cache, remote.kind, remote.name, pin, part)
    named = to is None and not part and not remote.is_pin(revision)
    if _is_there(target, remote, pin):
        if named and remembered_revision(cache, remote.kind, remote.name, revision) != pin:
            with contextlib.suppress(OSError):  # a volume that may only be read
                remember_revision(cache, remote.kind, remote.name, revision, pin)
        return Fetched(target.folder, pin)
    if is_offline():
        raise ConfigError(f"{remote.name} at {pin} is not in {target.folder}, and HF_HUB_OFFLINE is set; fetch it with: lockstep model get")
    try:
        with one_at_a_time(target, say) as suffix:
            if not _is_there(target, remote, pin):
                _fill_or_take(target, remote, pin, choose, say, suffix)
        if named:
            remember_revision(cache, remote.kind, remote.name, revision, pin)
    except MayPass as problem:
        raise TrainerError(f"{problem}; what has arrived is kept, and the next attempt goes on from there") from problem
    except OSError as error:
        raise refusal(fetch_problem(error, target.folder.parent), error) from error
    return Fetched(target.folder, pin)


def _is_there(target: Target, remote: Remote, pin: str) -> bool:
    record = whole_record(target.folder)
    if record is None:
        return False
    if (record.get("name"), record.get("pin")) != (remote.name, pin):
        raise ConfigError(
            f"{target.folder} holds {record.get('name')} at {record.get('pin')}, not {remote.name} at {pin}; name another folder"
        )
    return True


def _fill_or_take(target: Target, remote: Remote, pin: str, choose: Choose, say: Say, suffix: str) -> None:
    """Fill the folder, or take it as another process has filled it meanwhile, on a volume without locks."""
    try:
        _fill(target, remote, pin, choose, say, suffix)
    except (TrainerError, MayPass, OSError) as error:
        if _is_there(target, remote, pin):
            say(f"Another process has fetched {target.folder}")
            shutil.rmtree(target.partial, ignore_errors=True)
        elif isinstance(error, OSError) and error.errno in _MOVED:
            raise TrainerError(
                f"{error.filename or target.partial} was moved or removed while it was written ({error.strerror}); make sure that only one"
                " process fetches into a volume whose locks don't work, and start again"
            ) from error
        else:
            raise


def _fill(target: Target, remote: Remote, pin: str, choose: Choose, say: Say, suffix: str) -> None:
    listing = [file for file in _with_patience(lambda: remote.files(pin), say) if file.path != FETCHED]
    by_path = {file.path: file for file in listing}
    prepare_partial(target, remote.name, suffix)
    places = Transfer(target.partial, remote, pin, say, suffix)

    def read(path: str) -> bytes:
        _refuse_outside(remote, by_path[path])
        return places.bring(by_path[path]).read_bytes()

    files = list(choose(listing, read))
    for file in files:
        _refuse_outside(remote, file)
    _refuse_full(target, remote, files, suffix)
    places.bring_all(files)
    commit_folder(target, {"name": remote.name, "kind": remote.kind, "pin": pin, "files": {file.path: file.size for file in files}})
    say(f"Fetched {remote.name} at {pin}: {decimal_size(sum(file.size for file in files))} in {target.folder}")


def _refuse_outside(remote: Remote, file: RemoteFile) -> None:
    """Refuse paths that lead out of the folder: a listing is somebody else's text."""
    path = PurePosixPath(file.path)
    if path.is_absolute() or ".." in path.parts or path.name.endswith(PART):
        raise ConfigError(f"{remote.name} has a file {file.path!r}, which can't be kept in a folder; name another revision or copy")


def _refuse_full(target: Target, remote: Remote, files: Sequence[RemoteFile], suffix: str) -> None:
    present = sum(max(_size(target.partial / file.path), _size(target.partial / f"{file.path}{suffix}")) for file in files)
    needed, free = sum(file.size for file in files) - present + RESERVE_BYTES, free_bytes(target.partial)
    if free is not None and needed > free:
        raise TrainerError(
            f"{remote.name} needs {decimal_size(needed)} more in {target.folder.parent}, and {decimal_size(free)} are free there; free "
            f"{decimal_size(needed - free)} or use a larger claim"
        )


def fetch_problem(error: OSError, folder: Path) -> str:
    """Problem of the volume, in words."""
    where = error.filename or folder
    if error.errno in _FULL:
        return f"{where} can't be written: {error.strerror}; free space on the volume or use a larger claim; what has arrived is kept"
    return f"{where} can't be written: {error.strerror or error}; check that the volume is mounted and writable"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _at(revision: str | None) -> str:
    return "" if revision is None else f" at {revision}"


def _with_patience(ask: Callable[[], T], say: Say, attempts: int = ATTEMPTS, longest_seconds: float = LONGEST_WAIT_SECONDS) -> T:
    """Ask again while what is wrong may pass. Raises MayPass at the end."""
    for failures in range(1, attempts):
        try:
            return ask()
        except MayPass as problem:
            wait_seconds = min(_wait_after(problem, failures), longest_seconds)
            say(f"{problem}; trying again in {wait_seconds:g} s")
            time.sleep(wait_seconds)
    return ask()


def _wait_after(problem: MayPass, failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(max(problem.wait_seconds, BACKOFF_SECONDS * 2.0 ** max(0, failures - 1)), LONGEST_WAIT_SECONDS)


class _TooLong(MayPass):
    """Error of a remote that sends more bytes of a file than it has published."""


class Transfer:
    """Transfer of one remote's files into one folder. `suffix`: of unfinished ones."""

    def __init__(self, folder: Path, remote: Remote, pin: str, say: Say, suffix: str = PART) -> None:
        self._folder = folder
        self._remote = remote
        self._pin = pin
        self._say = say
        self._suffix = suffix
        self._cancelled = threading.Event()
        self._progress = FetchProgress(remote.name, 0, 0, say)

    def bring_all(self, files: Sequence[RemoteFile]) -> None:
        """Bring all files, several at once. Raises the first problem, when all others have ended."""
        self._progress = FetchProgress(self._remote.name, sum(file.size for file in files), len(files), self._say)
        with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="lockstep-fetch") as pool:
            # The largest first, so that none is alone at the end.
            waiting: set[Future[Path]] = {pool.submit(self.bring, file) for file in sorted(files, key=lambda file: -file.size)}
            try:
                while waiting:
                    ended, waiting = wait(waiting, TICK_SECONDS, FIRST_EXCEPTION)
                    for future in ended:
                        future.result()
                    self._progress.tell()
            except BaseException:
                self._cancelled.set()
                pool.shutdown(cancel_futures=True)
                raise

    def bring(self, file: RemoteFile) -> Path:
        """Bring one file, whole and checked. Raises ConfigError, MayPass, TrainerError, OSError."""
        path = self._folder / file.path
        if _size(path) == file.size and path.is_file():
            self._progress.present(file.size)
            self._progress.done()
            return path
        part = path.with_name(path.name + self._suffix)
        if not self._folder.is_dir():  # another process has finished it: nothing is to be begun anew in its place
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder))
        make_directory(part.parent)
        for _ in range(2):
            self._read(file, part)
            if self._remote.is_intact(file, part):
                part.rename(path)
                self._progress.done()
                return path
            self._progress.moved(-file.size)
            part.unlink()  # a wrong byte may be anywhere in it
        raise TrainerError(
            f"{file.path} of {self._remote.name} does not match its published digest, twice in a row; a proxy or a mirror may change it on"
            " the way: try without one (HF_ENDPOINT)"
        )

    def _read(self, file: RemoteFile, part: Path) -> None:
        """Read all bytes of a file, in as many attempts as bring it further, and a few more."""
        failures, furthest = 0, _size(part) if _size(part) <= file.size else 0
        self._progress.present(furthest)
        while True:
            with self._sink(part, file) as sink:
                start = sink.tell()
                try:
                    if start < file.size:
                        self._remote.read(file, self._pin, sink, start)
                    if (size := sink.tell()) != file.size:
                        raise MayPass(f"{file.path} of {self._remote.name} ended after {size} of {file.size} bytes")
                    os.fsync(sink.fileno())
                    return
                except MayPass as problem:
                    if isinstance(problem, _TooLong):
                        sink.restart()
                    failures = 0 if sink.tell() > furthest else failures + 1
                    furthest = max(furthest, sink.tell())
                    if failures >= ATTEMPTS:
                        raise
                    self._say(f"{problem}; trying again")
                    wait_seconds = _wait_after(problem, failures)
            if self._cancelled.wait(wait_seconds):
                raise Cancelled

    @contextlib.contextmanager
    def _sink(self, part: Path, remote: RemoteFile) -> Iterator[Counted]:
        problem = _TooLong(
            f"{self._remote.name} sends more of {remote.path} than the {remote.size} bytes it has published; a proxy may answer in its"
            " place"
        )
        with part.open("ab") as file:
            if file.tell() > remote.size:
                file.truncate(0)
            file.seek(0, os.SEEK_END)
            yield Counted(file, self._progress, self._cancelled, remote.size, problem)


class Counted:
    """File that is written to, of which each byte counts as progress.

    Ends its writer where another's failure has ended the fetch, and, with `too_long`, where the file would grow beyond `size`.
    """

    def __init__(self, file: BinaryIO, progress: FetchProgress, cancelled: threading.Event, size: int, too_long: Exception) -> None:
        self._file = file
        self._progress = progress
        self._cancelled = cancelled
        self._size = size
        self._too_long = too_long

    def write(self, data: bytes, /) -> int:
        if self._cancelled.is_set():
            raise Cancelled
        if self._file.tell() + len(data) > self._size:
            raise self._too_long
        written = self._file.write(data)
        self._progress.moved(written)
        return written

    def tell(self) -> int:
        return self._file.tell()

    def restart(self) -> None:
        self._progress.moved(-os.fstat(self.fileno()).st_size)
        self._file.seek(0)  # (else `tell` goes on from where it was)
        self._file.truncate(0)

    def fileno(self) -> int:
        self._file.flush()
        return self._file.fileno()


class FetchProgress:
    """Counter of bytes and files, for any thread."""

    def __init__(self, name: str, size_bytes: int, files: int, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._size = size_bytes
        self._files = files
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes = self._ended = self._present = 0
        self._last = (clock(), 0)
        self._next = clock() + FIRST_SECONDS

    def moved(self, count: int) -> None:
        """Count so many bytes more; fewer where a file is begun anew."""
        with self._lock:
            self._bytes += count

    def present(self, count: int) -> None:
        """Count bytes that were there before: they are no part of the speed."""
        with self._lock:
            self._present += count

    def done(self) -> None:
        """Count one more file."""
        with self._lock:
            self._ended += 1

    def tell(self) -> None:
        """Say a line if it is time, and if anything has moved since the last one."""
        now = self._clock()
        with self._lock:
            moved, present, ended = self._bytes, self._present, self._ended
        if now < self._next or moved <= self._last[1]:
            return
        then, before = self._last
        speed = (moved - before) / max(now - then, 1e-9)
        left = max(0, self._size - present - moved) / speed
        self._last, self._next = (now, moved), now + EVERY_SECONDS
        self._say(
            f"Fetching {self._name}: {decimal_size(present + moved)} of {decimal_size(self._size)}, {ended} of {self._files} files, "
            f"{speed / 1e6:,.0f} MB/s, about {duration(left)} left"
        )
