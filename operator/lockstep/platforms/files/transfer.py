"""Files between this machine and a job's volumes: `carry.py` at both ends, a connection between, and another try where it breaks."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.platforms.inpod import carry, source_of
from lockstep.platforms.inpod.wire import CarryError, Gone, Wire
from lockstep.programs import Broken, Place, Program, ProgramFailed, python_program

TRIES = 6
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 15.0
_PUMPED_BYTES = 1 << 18


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
    own_umask: bool = False,
    sender: Sender | None = None,
) -> Carried:
    """Copy a file or folder of this machine into the volumes that `place` sees. `own_umask`: who may write to it is up to the umask there;
    else its group may, as in pods. `sender`: who sends it; None: it isn't recorded. Raises Failed.
    """

    def give(wire: Wire) -> dict[str, Any]:
        return carry.give(wire, source, passed=progress.passing, expected=progress.expect)

    request = {"take": target, "roots": roots, "ownUmask": own_umask, "sender": sender and sender.request(roots)}
    return await _carried(place, request, give, progress)


async def get(place: Place, source: str, target: str, roots: list[str], progress: TransferProgress, name: str | None = None) -> Carried:
    """Copy a file or folder of the volumes that `place` sees to `target`. `name`: its name in a target that is a folder to put it into;
    None: as in `source`. The other end has no say in it. Raises Failed.
    """
    own = PurePosixPath(normpath(source)).name if name is None else name

    def take(wire: Wire) -> dict[str, Any]:
        return carry.take(wire, target, passed=progress.passing, expected=progress.expect, name=own)

    return await _carried(place, {"give": source, "roots": roots}, take, progress)


async def _carried(place: Place, request: dict[str, Any], end: Callable[[Wire], dict[str, Any]], progress: TransferProgress) -> Carried:
    """Transfer once, and again after a broken connection, as long as it makes progress."""
    left, missing, pause = TRIES, 0, FIRST_PAUSE_SECONDS
    while True:
        try:
            return Carried(**await _once(place, request, end))
        except Gone as broken:
            better = progress.missing < missing
            left, pause = (TRIES, FIRST_PAUSE_SECONDS) if better else (left - 1, min(2 * pause, LONGEST_PAUSE_SECONDS))
            missing = progress.missing
            if left == 0:
                raise Failed(f"{broken}; what has arrived is kept: run the same command again to continue") from broken
            await asyncio.sleep(pause)


async def _once(place: Place, request: dict[str, Any], end: Callable[[Wire], dict[str, Any]]) -> dict[str, Any]:
    mine, theirs = socket.socketpair()
    try:
        async with python_program(place, source_of(carry), json.dumps(request)) as running:
            return await between(running, mine, theirs, end)
    except (Broken, OSError) as error:
        raise Gone(str(error)) from error
    finally:
        mine.close()
        theirs.close()


async def between(running: Program, mine: socket.socket, theirs: socket.socket, end: Callable[[Wire], dict[str, Any]]) -> dict[str, Any]:
    """Run this machine's end in a thread, and pump bytes between it and the other end."""
    reader, writer = await asyncio.open_connection(sock=mine)
    pumps = [asyncio.ensure_future(_up(reader, running, theirs)), asyncio.ensure_future(_down(running, writer))]
    thread = asyncio.ensure_future(asyncio.to_thread(end, Wire(theirs.fileno(), theirs.fileno())))
    try:
        return await asyncio.shield(thread)
    except (CarryError, OSError) as error:  # what a program there refused, or a disk here
        raise Failed(str(error)) from error
    except Gone:
        with suppress(ProgramFailed, TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.shield(pumps[1])  # (its last words, and how it ended)
        if running.code is not None:
            raise running.failure() from None
        raise
    finally:
        for pump in pumps:
            pump.cancel()
        _wake(theirs)
        await asyncio.gather(thread, *pumps, return_exceptions=True)
        writer.close()


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
