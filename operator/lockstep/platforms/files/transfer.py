"""Files between this machine and a job's volumes: `carry.py` at both ends, a connection between, and another try where it breaks."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any, TypeVar

from lockstep.api.errors import ConfigError, Failed
from lockstep.platforms.inpod import carry, source_of
from lockstep.programs import Broken, Place, Program, ProgramFailed, python_program
from lockstep_machine.wire import SILENCE_SECONDS, CarryError, Gone, Wire

TRIES = 6
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 15.0
_PUMPED_BYTES = 1 << 18
T = TypeVar("T")


@dataclass
class TransferProgress:
    """Progress of one transfer. `changed` is called whenever a number has changed."""

    changed: Callable[[], None] = lambda: None
    expected: int = 0
    """Bytes to come, once they are known."""
    passed: int = 0
    missing: int = 0
    """Bytes that the other end lacked when this try began: what was sent has not always arrived."""

    def expect(self, size: int) -> None:
        self.expected, self.missing = self.passed + size, size
        self.changed()

    def passing(self, size: int) -> None:
        self.passed += size
        self.changed()


@dataclass(frozen=True)
class Carried:
    """Result of a transfer: its files, those that had to travel, and how many bytes of them."""

    files: int
    sent: int
    bytes: int
    resumed: int


@dataclass(frozen=True)
class Sender:
    """Sender of a copy, for the records of a volume: files that another folder sent stay as they are."""

    origin: str
    """The file or folder that is sent, as HOST:PATH."""
    line: str
    """Line that gives it a place of its own."""
    force: bool = False

    def request(self, roots: Sequence[str]) -> dict[str, Any]:
        """Return the part of a request that names the sender. `roots`: folders of the volumes there."""
        return {"origin": self.origin, "line": self.line, "force": self.force, "roots": list(roots)}


async def put(
    place: Place,
    source: Path,
    target: str,
    roots: list[str],
    progress: TransferProgress,
    *,
    sender: Sender | None = None,
    on_host: bytes | None = None,
) -> Carried:
    """Copy a file or folder of this machine into the volumes that `place` sees. `sender`: who sends it; None: it isn't recorded. `on_host`:
    text of `carry` for the Python of a host, whose umask says who may write to it; None: in a pod, its group may. Raises Failed.
    """
    request = {"take": target, "roots": roots, "ownUmask": on_host is not None, "sender": sender and sender.request(roots)}
    return await retried(lambda: _once(place, request, giving(source, progress), on_host), progress)


def giving(source: Path, progress: TransferProgress) -> Callable[[Wire], dict[str, Any]]:
    """Return the end that sends a file or folder of this machine."""
    return lambda wire: carry.give(wire, source, passed=progress.passing, expected=progress.expect)


async def get(place: Place, source: str, target: str, roots: list[str], progress: TransferProgress, name: str | None = None) -> Carried:
    """Copy a file or folder of the volumes that `place` sees to `target`. `name`: its name in a target that is a folder to put it into;
    None: as in `source`. The other end has no say in it. Raises Failed.
    """
    own = PurePosixPath(normpath(source)).name if name is None else name

    def take(wire: Wire) -> dict[str, Any]:
        return carry.take(wire, target, passed=progress.passing, expected=progress.expect, name=own).counts

    return await retried(lambda: _once(place, {"give": source, "roots": roots}, take), progress)


async def retried(once: Callable[[], Awaitable[Carried]], progress: TransferProgress) -> Carried:
    """Transfer once, and again after a broken connection, as long as it makes progress. `once` raises Gone for one. Raises Failed."""
    left, missing, pause = TRIES, 0, FIRST_PAUSE_SECONDS
    while True:
        try:
            return await once()
        except Gone as broken:
            better = progress.missing < missing
            left, pause = (TRIES, FIRST_PAUSE_SECONDS) if better else (left - 1, min(2 * pause, LONGEST_PAUSE_SECONDS))
            missing = progress.missing
            if left == 0:
                raise Failed(f"{broken}; what has arrived is kept: run the same command again to continue") from broken
            await asyncio.sleep(pause)


async def _once(place: Place, request: dict[str, Any], end: Callable[[Wire], dict[str, Any]], program: bytes | None = None) -> Carried:
    try:
        async with python_program(place, program or source_of(carry), json.dumps(request)) as running, wired(running) as one:
            return Carried(**await one.run(end))
    except (Broken, OSError) as error:
        raise Gone(str(error)) from error


class Wired:
    """A program there, as an end in a thread of this machine talks to it. Each has a thread of its own, however many there are: who waits
    for one is taken for gone.
    """

    def __init__(self, running: Program, wire: Wire, down: asyncio.Future[None], threads: ThreadPoolExecutor) -> None:
        self.running, self._wire, self._down, self._threads = running, wire, down, threads
        self.thread: asyncio.Future[Any] | None = None

    @property
    def has_ended(self) -> bool:
        """True if nothing more comes from there."""
        return self._down.done()

    async def run(self, end: Callable[[Wire], T]) -> T:
        """Run an end in a thread, and return its answer. Raises Failed, Gone, OSError."""
        self.thread = thread = asyncio.get_running_loop().run_in_executor(self._threads, end, self._wire)
        try:
            return await asyncio.shield(thread)
        except (CarryError, OSError) as error:  # what a program there refused, or a disk here
            raise Failed(str(error)) from error
        except Gone:
            with suppress(ProgramFailed, TimeoutError):
                async with asyncio.timeout(5.0):
                    await asyncio.shield(self._down)  # (its last words, and how it ended)
            if self.running.code is not None:
                raise self.running.failure() from None
            raise


@asynccontextmanager
async def wired(running: Program, silence: float = SILENCE_SECONDS) -> AsyncIterator[Wired]:
    """Pump bytes between a program there and an end here, which gives up after so many seconds of silence."""
    mine, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=mine)
    pumps = [asyncio.ensure_future(_up(reader, running, theirs)), asyncio.ensure_future(_down(running, writer))]
    threads = ThreadPoolExecutor(1)
    one = Wired(running, Wire(theirs.fileno(), theirs.fileno(), silence), pumps[1], threads)
    try:
        yield one
    finally:
        for pump in pumps:
            pump.cancel()
        _wake(theirs)
        await asyncio.gather(*filter(None, [one.thread]), *pumps, return_exceptions=True)
        threads.shutdown()
        writer.close()
        theirs.close()


def _wake(theirs: socket.socket) -> None:
    """End the connection of the thread, if it still waits to read or to write."""
    with suppress(OSError):
        theirs.shutdown(socket.SHUT_RDWR)


async def _up(reader: asyncio.StreamReader, running: Program, theirs: socket.socket) -> None:
    try:
        while data := await reader.read(_PUMPED_BYTES):
            await running.write(data)
    finally:
        _wake(theirs)


async def _down(running: Program, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await running.read():
            writer.write(data)
            await writer.drain()
    finally:
        writer.write_eof()


def refuse_outside(path: str, roots: list[str]) -> None:
    """Refuse a path that can't be on a volume of the job. Raises ConfigError."""
    parts = Path(path).parts
    if ".." in parts or not any(parts[: len(Path(root).parts)] == Path(root).parts for root in roots):
        raise ConfigError(f"{path} is not on a volume of the job: choose a path below {', '.join(sorted(roots))}")
