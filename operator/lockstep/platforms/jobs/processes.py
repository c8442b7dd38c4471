"""Programs whose bytes go through the pipes of a process of this machine: one that runs here, or an ssh that leads to a host; and this
machine, as a place where programs run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from lockstep.programs import STDERR, STDOUT, Broken, NotStarted, Place, Program

PIECE_BYTES = 1 << 18
PIECES_AHEAD = 8


async def ended(process: asyncio.subprocess.Process, number: signal.Signals = signal.SIGTERM) -> None:
    """End a process, if it still runs."""
    if process.returncode is None:
        # Not terminate(): it reaps a process that has just ended, and asyncio, which waits for it, then warns.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        await process.wait()


class ProcessProgram(Program):
    """A program behind the pipes of a process."""

    end_signal = signal.SIGKILL

    def __init__(self, place: Place, transport: asyncio.SubprocessTransport, process: asyncio.subprocess.Process) -> None:
        super().__init__(place)
        self._transport, self._process = transport, process
        self._pieces: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue(PIECES_AHEAD)
        self._open = {STDOUT, STDERR}
        """Channels that have not ended."""
        self._readers = [
            asyncio.create_task(self._read(STDOUT, process.stdout)),
            asyncio.create_task(self._read(STDERR, process.stderr)),
        ]

    @classmethod
    async def start(cls, place: Place, command: Sequence[str], *, stdin: bool = True) -> Self:
        """Start the process, in a session of its own. Raises OSError."""
        loop, pipe = asyncio.get_running_loop(), asyncio.subprocess.PIPE
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=PIECE_BYTES, loop=loop),
            *command,
            stdin=pipe if stdin else asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True,
        )  # fmt: skip
        return cls(place, transport, asyncio.subprocess.Process(transport, protocol, loop))

    async def _read(self, channel: int, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None  # noqa: S101 (both are pipes)
        while data := await stream.read(PIECE_BYTES):
            await self._pieces.put((channel, data))
        await self._pieces.put((channel, b""))

    async def write(self, data: bytes | memoryview) -> None:
        await self._send(data)

    async def _send(self, data: bytes | memoryview) -> None:
        if self._process.stdin is None:
            raise Broken(f"a program on {self.place.name} reads no input")
        view = memoryview(data)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                self._process.stdin.write(view[start : start + PIECE_BYTES])
                await self._process.stdin.drain()
        except (OSError, RuntimeError) as error:
            raise Broken(f"the connection to {self.place.name} broke: {error}") from error

    async def close_stdin(self) -> bool:
        if self._process.stdin is not None:
            self._process.stdin.close()
        return True

    async def resize(self, columns: int, lines: int) -> None:
        """Do nothing: this program has no terminal of its own."""

    async def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        while self._open:
            channel, data = await self._pieces.get()
            if data:
                yield channel, data
            else:
                self._open.discard(channel)
        self.code = await self._process.wait()

    async def end(self) -> None:
        """End the process, if it hasn't ended. Nothing waits for a reader of its pipes."""
        try:
            for reader in self._readers:
                reader.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)
            for pipe in filter(None, map(self._transport.get_pipe_transport, (STDOUT, STDERR))):
                pipe.close()  # asyncio never sees the end of one that waits for its reader, and waits for that beside the process
            await ended(self._process, self.end_signal)
        finally:  # (a second Ctrl-C comes in between)
            self._transport.close()


@dataclass(frozen=True)
class LocalPlace:
    """This machine."""

    python: Sequence[str] = (sys.executable,)

    @property
    def name(self) -> str:
        return "this machine"

    @asynccontextmanager
    async def program(
        self, command: Sequence[str], *, stdin: bool = True, tty: bool = False, pings: bool = False
    ) -> AsyncIterator[Program]:
        """Start `command` here, without a terminal of its own. Raises NotStarted: there is no such command."""
        try:
            program = await ProcessProgram.start(self, command, stdin=stdin)
        except OSError as error:
            raise NotStarted(f"no program could be started in {self.name}: {command[0]}: {error.strerror}") from error
        try:
            yield program
        finally:
            await program.end()
