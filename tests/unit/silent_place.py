"""A place whose programs take everything that is written to them, and never say anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lockstep.programs import Program


class SilentPlace:
    def __init__(self, name: str = "host lab0") -> None:
        self.name = name
        self.python: Sequence[str] = ("python3",)
        self.running = self.most = 0
        """Programs that run, and the most that ran at once."""

    @asynccontextmanager
    async def program(
        self, command: Sequence[str], *, stdin: bool = True, tty: bool = False, pings: bool = False
    ) -> AsyncIterator[Program]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield SilentProgram(self)
        finally:
            self.running -= 1


class SilentProgram(Program):
    async def write(self, data: bytes | memoryview) -> None:
        pass

    async def close_stdin(self) -> bool:
        return True

    async def resize(self, columns: int, lines: int) -> None:
        pass

    async def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        await asyncio.Event().wait()
        yield 0, b""  # pragma: no cover
