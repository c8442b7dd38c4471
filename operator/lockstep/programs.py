"""Programs that run somewhere else: in a pod, on a host, or beside this process. Bytes go to them and come from them; `Place` says where.

async with python_program(place, source_of(carry), json.dumps(request)) as running:
    await running.write(b"...")
    while data := await running.read():
        ...
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from lockstep.api.errors import Failed

T = TypeVar("T")
STDOUT, STDERR = 1, 2
_REMEMBERED_BYTES = 1 << 16
WORDS_MAX = 2000
LINE_BYTES_MAX = 4 << 20
OUTPUT_BYTES_MAX = 16 << 20
"""Limit of output that is collected: what runs elsewhere must not fill this machine's memory."""
BOOT = (
    "import os, sys\nn, text = int(sys.argv.pop(1)), b''\nwhile len(text) < n:\n text += os.read(0, n - len(text)) or sys.exit('no program"
    " came')\nexec(compile(text, 'lockstep', 'exec'))"
)
"""`python3 -c BOOT <bytes> …` runs the program of that many bytes that comes first on standard input. A command is part of the request's
URL, and some proxies refuse a URL of a program's size.
"""


class ProgramFailed(Failed):
    """A program ended with an error, or its connection broke. The message has the last lines of its standard error."""


class Broken(ProgramFailed):
    """The connection broke; the program may have ended, or run on."""


class NotStarted(ProgramFailed):
    """The program did not start: no right to run it, nothing there to run it, or no such command. The message says which."""


class Program(ABC):
    """A program that runs at a place. The end of its standard error is kept for the message when it fails."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.errors = b""
        self.code: int | None = None
        """Exit code; None: the connection ended before the program's end was reported."""
        self.not_started = ""
        """Reason why it never ran, or ''."""

    @abstractmethod
    async def write(self, data: bytes | memoryview) -> None:
        """Write to its standard input, and wait while the other side is slower. Raises Broken when it can't be reached."""

    @abstractmethod
    async def close_stdin(self) -> bool:
        """Close its standard input. Return False if that can't be passed on."""

    @abstractmethod
    async def resize(self, columns: int, lines: int) -> None:
        """Tell its terminal its size."""

    @abstractmethod
    def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield pairs of STDOUT or STDERR and what was printed there; at the end set `code`, or `not_started`."""

    async def _printed(self) -> AsyncIterator[tuple[int, bytes]]:
        async for channel, data in self._received():
            if channel == STDERR:
                self.errors = (self.errors + data)[-_REMEMBERED_BYTES:]
            yield channel, data

    async def read(self) -> bytes:
        """Next bytes of its standard output; b"" at the end."""
        async for channel, data in self._printed():
            if channel == STDOUT:
                return data
        return b""

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        """Pairs of STDOUT or STDERR and what was printed there, in the order in which it came. At the end `code` says how the program
        ended.

        Raises Broken where nobody knows how, NotStarted where it never ran.
        """
        async for channel, data in self._printed():
            yield channel, data
        if self.code is None or self.not_started:
            raise self.failure()

    def failure(self) -> ProgramFailed:
        """Exception to raise when the program ended too early or with an error."""
        name = self.place.name
        if self.not_started:
            return NotStarted(f"no program could be started in {name}: {self.not_started}")
        message = " | ".join(self.errors.decode(errors="replace").strip().splitlines()[-3:])[-WORDS_MAX:]
        if self.code is None:
            return Broken(f"the connection to {name} broke{message and f', after: {message}'}")
        return ProgramFailed(f"{name}: {message or f'it ended with {self.code}'}")


class Place(Protocol):
    """A running container, a host, or this machine: where a program can run."""

    @property
    def name(self) -> str:
        """Name in messages: `pod demo-0`, `host lab0`."""

    @property
    def python(self) -> Sequence[str]:
        """Beginning of a command that runs Python there."""

    def program(
        self, command: Sequence[str], *, stdin: bool = True, tty: bool = False, pings: bool = False
    ) -> AbstractAsyncContextManager[Program]:
        """Start `command` there. The connection's end is the program's only where it reads its standard input.

        `pings` keep the connection of a silent program open, where all that it prints is read at once: their answers stand behind what
        isn't read yet, and a slow disk would look like a broken connection.

        Raises:
            NotStarted: the place is gone, or nobody may run programs in it.
        """


async def lines_in(running: Program) -> AsyncIterator[bytes]:
    """Lines of its standard output; text without a line's end is none. Raises ProgramFailed for a line that is longer than any answer."""
    rest = bytearray()  # (bytes would be copied with each piece, however small)
    while data := await running.read():
        rest += data
        *whole, rest = rest.split(b"\n") if b"\n" in data else (rest,)
        if max(map(len, (*whole, rest))) > LINE_BYTES_MAX:
            raise ProgramFailed(
                f"{running.place.name}: python3 prints a line of more than {LINE_BYTES_MAX} bytes, which is not a valid answer"
            )
        for line in whole:
            yield bytes(line)


def answer_of(text: bytes | str, where: str) -> dict[str, Any]:
    """Object that a program printed as one line of JSON at the place of the name `where`.

    Raises ProgramFailed for anything else: whoever made the image, or owns the host, decides what it prints.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        start = text[:100] if isinstance(text, str) else text[:100].decode(errors="replace")
        raise ProgramFailed(f"python3 in {where} says {start!r}, which is not a valid answer")
    return answer


async def next_answer(program: Program, answers: AsyncIterator[bytes], word: str = "") -> dict[str, Any]:
    """Read one answer. Raises ProgramFailed with what the program says instead of `word`, or can't do."""
    async for line in answers:
        answer = answer_of(line, program.place.name)
        if "problem" in answer or (word and word not in answer):
            raise ProgramFailed(f"{program.place.name}: {answer.get('problem', answer)}")
        return answer
    raise program.failure()


async def output_of(
    place: Place, command: Sequence[str], *, stdin: bytes = b"", seconds: float = 60.0, most: int = OUTPUT_BYTES_MAX
) -> bytes:
    """Output of the program. It must read `stdin` by its length: not every place passes its end on.

    Raises ProgramFailed when it ends with an error, takes longer than `seconds` or prints more than `most` bytes.
    """
    output = bytearray()
    async with place.program(command, stdin=bool(stdin), pings=True) as running:
        try:
            async with asyncio.timeout(seconds):
                with suppress(Broken):  # (a program that ended before it had read all: what it said tells more)
                    await running.write(stdin)
                while data := await running.read():
                    output += data
                    if len(output) > most:
                        raise ProgramFailed(f"{place.name}: {command[0]} prints more than {most} bytes, which is not a valid answer")
        except TimeoutError:
            raise ProgramFailed(f"{place.name}: {command[0]} has not ended after {seconds:.0f} s") from None
        if running.code != 0:
            raise running.failure()
    return bytes(output)


def boot_command(source: bytes, *arguments: str, python: Sequence[str] = ("python3",), options: Sequence[str] = ("-I",)) -> list[str]:
    """Command that runs the Python program `source`, which is the first to be written to its standard input, with these arguments."""
    return [*python, *options, "-c", BOOT, str(len(source)), *arguments]


@asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Do the work beside the block. At the block's end it has ended: what isn't done by then is given up, and what it raises is left to the
    task.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def kept_alive(running: Program, message: bytes, seconds: float) -> AsyncIterator[None]:
    """Write `message` every so many seconds meanwhile: the program ends when it has heard nothing for long, and proxies cut silent
    connections.
    """

    async def beat() -> None:
        with suppress(Failed):
            while True:
                await asyncio.sleep(seconds)
                await running.write(message)

    async with meanwhile(beat()):
        yield


@asynccontextmanager
async def python_program(
    place: Place, source: bytes, *arguments: str, options: Sequence[str] = ("-I",), pings: bool = False
) -> AsyncIterator[Program]:
    """Start a program of Lockstep's there; what is written to it then is its own standard input. Raises as `Place.program` does.

    `options`: of python3. -I keeps the place's variables and folders from changing what the program imports.
    """
    async with place.program(boot_command(source, *arguments, python=place.python, options=options), pings=pings) as running:
        with suppress(Broken):  # (what it said, or why it never ran, tells more: its output ends with that)
            await running.write(source)
        yield running


async def python_output(place: Place, source: bytes, *arguments: str, seconds: float = 60.0, most: int = OUTPUT_BYTES_MAX) -> bytes:
    """Output of a program of Lockstep's there. Raises as `output_of` does."""
    command = boot_command(source, *arguments, python=place.python)
    return await output_of(place, command, stdin=source, seconds=seconds, most=most)
