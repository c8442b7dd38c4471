"""Programs on hosts, over ssh: their bytes both ways, their exit code, and a terminal for those that want one.

The remote command line is a constant, so that no login shell reads anything else into it: it was tried with bash, dash, zsh, fish and tcsh.
All else comes by standard input: the starter (`onhost/starter.py`), what it is to start, and then the program's own input.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from lockstep.platforms.hosts.ssh import OWN_FAILURE, WORDS_MAX, Login, Shared, unreachable
from lockstep.platforms.jobs.processes import PIECE_BYTES, ProcessProgram
from lockstep.platforms.onhost import relay, starter
from lockstep.programs import STDERR, STDOUT, Broken, NotStarted

REMOTE = 'exec python3 -I -S -c "import os;exec(bytes().join(iter(lambda:os.read(0,1)or os._exit(9),bytes([10]))))"'
NOISE_BYTES_MAX = 1 << 16


@cache
def _text_of(program: ModuleType) -> bytes:
    """Text of a program, without what only newer Pythons than a host's may know."""
    text = Path(str(program.__file__)).read_text(encoding="utf-8")
    return text.replace("from __future__ import annotations\n", "").encode()


def beginning(words: Sequence[str], environment: Sequence[tuple[str, str]], newer: Sequence[str] = ()) -> bytes:
    """First bytes of standard input: a line that reads the starter, the starter, and what it is to start.

    `newer`: Pythons to take, the first that is there, where the host's own `python3` is too old.
    """
    text = _text_of(starter)
    line = (
        f"t=b''\nwhile len(t)<{len(text)}:\n p=os.read(0,{len(text)}-len(t))\n if not p:os._exit(9)\n"
        " t+=p\nexec(compile(t,'lockstep','exec'))"
    )
    head = json.dumps({"words": list(words), "environment": dict(environment), "newer": list(newer)}).encode()
    return b"exec(" + ascii(line).encode() + b")\n" + text + str(len(head)).zfill(starter.HEAD_DIGITS).encode() + head


def without_beginning(data: bytes, mark: bytes) -> tuple[bytes, bytes]:
    """Split the data before the longest end of it that the mark begins with, or is."""
    size = next(size for size in range(min(len(mark), len(data)), -1, -1) if data.endswith(mark[:size]))
    return data[: len(data) - size], data[len(data) - size :]


@dataclass(frozen=True)
class HostPlace:
    """A host, as a place where programs can run."""

    shared: Shared
    python: Sequence[str] = ("python3",)
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of every program, beside those of the login."""
    newer: tuple[str, ...] = ()
    """Pythons that programs get where the host's own is older than 3.10: the first of these paths that is there."""

    @property
    def name(self) -> str:
        return f"host {self.shared.login.name}"

    @asynccontextmanager
    async def program(
        self, command: Sequence[str], *, stdin: bool = True, tty: bool = False, pings: bool = False
    ) -> AsyncIterator[HostProgram]:
        """Start `command` on the host. It ends with the connection. ssh keeps silent connections alive by itself.

        Raises:
            HostUnreachable: the host doesn't answer or doesn't let you in.
            NotStarted: its login shell runs no program, or there is no such program.
        """
        await self.shared.be_open()
        words = [*self.python, "-I", "-c", _text_of(relay).decode(), *command] if tty else command
        kind = TerminalProgram if tty else HostProgram
        program = await self.shared.patiently(lambda: kind.begun(self, beginning(words, self.environment, self.newer)))
        try:
            if not stdin:
                await program.close_stdin()
            yield program
        finally:
            await program.end()


class HostProgram(ProcessProgram):
    """A program on a host, over ssh, which connects, or takes the shared connection."""

    end_signal = signal.SIGTERM
    _noise = b""
    _first = b""
    _login: Login

    @classmethod
    async def begun(cls, place: HostPlace, data: bytes) -> HostProgram:
        """Start ssh, and with it the program that `data` says. Raises HostUnreachable, or NotStarted with the login shell's words."""
        shared = place.shared
        program = await cls.start(place, shared.command("-T", "--", shared.login.name, REMOTE))
        program._login = shared.login
        try:
            await program.begin(data)
        except BaseException:
            await program.end()
            raise
        return program

    @property
    def noise(self) -> str:
        """Output of the login shell, before the program's own."""
        return self._noise.decode(errors="replace")

    async def begin(self, data: bytes) -> None:
        """Send what to start, and read up to the mark. Raises HostUnreachable, or NotStarted with the login shell's words."""
        with contextlib.suppress(Broken):  # (why it ended is read below)
            await self._send(data)
        while self._open and len(self._noise) <= NOISE_BYTES_MAX:
            channel, piece = await self._pieces.get()
            if not piece:
                self._open.discard(channel)
            elif channel == STDERR:
                self.errors = (self.errors + piece)[-NOISE_BYTES_MAX:]
            else:
                self._noise += piece
                before, mark, after = self._noise.partition(starter.MARK)
                if mark:
                    self._noise, self._first, self.errors = before, after, b""
                    return
        await self._refuse()

    async def _refuse(self) -> None:
        errors = self.errors.decode(errors="replace")
        _, missing, program = self._noise.partition(starter.NO_PROGRAM)
        if missing:
            raise NotStarted(f"no program could be started on {self.place.name}: there is no {program.decode(errors='replace').strip()}")
        code = await self._process.wait() if not self._open else None
        if code == OWN_FAILURE:
            raise unreachable(self._login, errors)
        lines = [line.strip() for line in (*self.noise.split("\n")[-3:], *errors.split("\n")[-3:])]
        words = " | ".join(filter(None, lines))[-WORDS_MAX:]
        raise NotStarted(
            f"no program could be started on {self.place.name}: its login shell says: {words or f'nothing, and ended with {code}'} "
            f"(ssh {self._login.words} python3 --version must print a version)"
        )

    async def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        if self._first:
            first, self._first = self._first, b""
            yield STDOUT, first
        held = b""  # the end of standard error, as far as it may be the mark's beginning: a mark may come in two pieces
        while self._open:
            channel, data = await self._pieces.get()
            if not data:
                self._open.discard(channel)
            elif channel == STDERR:
                errors, held = without_beginning(held + data, starter.ENDED_255)
                if errors:
                    yield STDERR, errors
            else:
                yield channel, data
        is_255 = held == starter.ENDED_255
        if held and not is_255:
            yield STDERR, held
        code = await self._process.wait()
        self.code = code if 0 <= code < OWN_FAILURE or is_255 else None


class TerminalProgram(HostProgram):
    """A program on a host, in a terminal of its own there."""

    async def write(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            await self._frame(relay.DATA, bytes(data[start : start + PIECE_BYTES]))

    async def close_stdin(self) -> bool:
        await self._frame(relay.END)
        return True

    async def resize(self, columns: int, lines: int) -> None:
        await self._frame(relay.RESIZE, relay.SIZE.pack(columns, lines))

    async def _frame(self, kind: bytes, content: bytes = b"") -> None:
        await self._send(relay.HEADER.pack(kind, len(content)) + content)
