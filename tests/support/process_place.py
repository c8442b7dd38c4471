"""This machine, or a network namespace of it, as a place where programs run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lockstep.programs import STDERR, STDOUT, Broken, Program


@dataclass(frozen=True)
class ProcessPlace:
    """`prefix`: the beginning of every command, such as one that enters a namespace."""

    name: str = "here"
    prefix: Sequence[str] = ()
    python: Sequence[str] = ("python3",)

    @asynccontextmanager
    async def program(
        self, command: Sequence[str], *, stdin: bool = True, tty: bool = False, pings: bool = False
    ) -> AsyncIterator[Program]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self.prefix, *command, stdin=pipe, stdout=pipe, stderr=pipe)
        running = LocalProgram(self, process)
        try:
            yield running
        finally:
            await running.close()


class LocalProgram(Program):
    """A child of this process."""

    def __init__(self, place: ProcessPlace, process: asyncio.subprocess.Process) -> None:
        super().__init__(place)
        self.process = process

    async def write(self, data: bytes | memoryview) -> None:
        try:
            self.process.stdin.write(bytes(data))
            await self.process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Broken(f"the connection to {self.place.name} broke: {error}") from error

    async def close_stdin(self) -> bool:
        self.process.stdin.close()
        return True

    async def resize(self, columns: int, lines: int) -> None:
        """It has no terminal."""

    async def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        while data := await self.process.stdout.read(1 << 16):
            yield STDOUT, data
        yield STDERR, await self.process.stderr.read()
        self.code = await self.process.wait()

    async def close(self) -> None:
        """End its input, and the process by its id where that doesn't end it."""
        await self.close_stdin()
        try:
            await asyncio.wait_for(self.process.wait(), 10)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        self.process._transport.close()  # type: ignore[attr-defined]  # (its pipes, before the loop ends)
