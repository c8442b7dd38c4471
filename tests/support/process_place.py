"""This machine, or a network namespace of it, as a place where programs run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from lockstep.platforms.jobs.processes import ProcessProgram
from lockstep.programs import Program


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
        running = await LocalProgram.start(self, [*self.prefix, *command])
        try:
            yield running
        finally:
            await running.end()


class LocalProgram(ProcessProgram):
    """A child of this process, which may end by itself."""

    async def end(self) -> None:
        await self.close_stdin()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 10)
        await super().end()
