"""This machine, as a place where programs run."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lockstep.programs import STDERR, STDOUT, Broken, NotStarted, Program

PIECE_BYTES = 1 << 18


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
    ) -> AsyncIterator[LocalProgram]:
        """Start `command` here, without a terminal of its own. Raises NotStarted: there is no such command."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe if stdin else null, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise NotStarted(f"no program could be started in {self.name}: {command[0]}: {error.strerror}") from error
        program = LocalProgram(self, process)
        try:
            yield program
        finally:
            await program.end()


class LocalProgram(Program):
    """A process of this machine."""

    def __init__(self, place: LocalPlace, process: asyncio.subprocess.Process) -> None:
        super().__init__(place)
        self._process = process
        self._queue: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue(8)
        self._open = {STDOUT, STDERR}
        self._readers = [asyncio.create_task(self._read(STDOUT, process.stdout)), asyncio.create_task(self._read(STDERR, process.stderr))]

    async def _read(self, channel: int, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (data := await stream.read(PIECE_BYTES)):
            await self._queue.put((channel, data))
        await self._queue.put((channel, b""))

    async def write(self, data: bytes | memoryview) -> None:
        if self._process.stdin is None:
            raise Broken(f"a program on {self.place.name} reads no input")
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except OSError as error:
            raise Broken(f"the program on {self.place.name} reads no more: {error.strerror}") from error

    async def close_stdin(self) -> bool:
        if self._process.stdin is not None:
            self._process.stdin.close()
        return True

    async def resize(self, columns: int, lines: int) -> None:
        """Do nothing: its terminal, if it has one, is the person's own."""

    async def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        while self._open:
            channel, data = await self._queue.get()
            if data:
                yield channel, data
            else:
                self._open.discard(channel)
        self.code = await self._process.wait()

    async def end(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
