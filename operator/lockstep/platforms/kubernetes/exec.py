"""Programs in pods: what `kubectl exec` does, by websocket, with both directions at once and no more in memory than a few frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.api.errors import Failed
from lockstep.platforms.kubernetes.cluster import Cluster, path_of

STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
FRAME_BYTES = 1 << 18
_REMEMBERED_BYTES = 1 << 16
BOOT = "import os, sys\nn, text = int(sys.argv.pop(1)), b''\nwhile len(text) < n:\n text += os.read(0, n - len(text)) or sys.exit('no program came')\nexec(compile(text, 'lockstep', 'exec'))"
"""`python3 -c BOOT <bytes> …` runs the text that comes first by standard input: a command line of its size would not pass every proxy."""


class Place(NamedTuple):
    """A running container."""

    namespace: str
    pod: str
    container: str


class ProgramFailed(Failed):
    """A program in a pod ended with an error, or its connection broke. The message has the last lines of its standard error."""


class Broken(ProgramFailed):
    """The connection broke, and what became of the program nobody knows."""


@dataclass
class Program:
    """A program in a pod: bytes to it, bytes from it. Its standard error is kept (the end of it) for the message when it fails."""

    place: Place
    _socket: Any
    errors: bytes = b""
    code: int | None = field(default=None)
    """None: the connection ended before the program said how it ended."""

    async def write(self, data: bytes | memoryview) -> None:
        """Waits while the other side is slower. Raises Broken when it can't be reached."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), FRAME_BYTES):
                await self._socket.send_bytes(bytes([STDIN]) + view[start : start + FRAME_BYTES])
        except (OSError, RuntimeError) as error:
            raise Broken(f"the connection to pod {self.place.pod} broke: {error}") from error

    async def close_stdin(self) -> None:
        """Tell the program that nothing more comes; API servers older than 1.30 can't pass that on."""
        if self._socket.protocol == "v5.channel.k8s.io":
            await self._socket.send_bytes(bytes([CLOSE, STDIN]))

    async def resize(self, columns: int, lines: int) -> None:
        await self._socket.send_bytes(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": lines}).encode())

    async def read(self) -> bytes:
        """The next of its standard output; b"" at the end."""
        async for channel, data in self._frames():
            if channel == STDOUT:
                return data
        return b""

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        """(STDOUT or STDERR, what was printed there), in the order in which it came."""
        async for channel, data in self._frames():
            if channel in (STDOUT, STDERR):
                yield channel, data

    async def _frames(self) -> AsyncIterator[tuple[int, bytes]]:
        async for message in self._socket:
            if not isinstance(message.data, bytes) or len(message.data) < 2:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == STDERR:
                self.errors = (self.errors + data)[-_REMEMBERED_BYTES:]
            elif channel == STATUS:
                self.code = _exit_code(data)
            yield channel, data

    def failure(self) -> ProgramFailed:
        """What to raise when it ended too early or with an error."""
        said = self.errors.decode(errors="replace").strip().splitlines()[-3:]
        ended = "its connection broke" if self.code is None else f"it ended with {self.code}"
        return ProgramFailed(f"pod {self.place.pod}: {' | '.join(said) or ended}")


def _exit_code(status: bytes) -> int:
    told = json.loads(status)
    if told.get("status") == "Success":
        return 0
    causes = (told.get("details") or {}).get("causes") or []
    code = next((cause["message"] for cause in causes if cause.get("reason") == "ExitCode"), "")
    return int(code) if code.isdecimal() else 1


@asynccontextmanager
async def program(
    cluster: Cluster, place: Place, command: Sequence[str], *, stdin: bool = True, tty: bool = False
) -> AsyncIterator[Program]:
    """Start `command` in the container. The connection's end is the program's only where it reads its standard input.

    Raises:
        ApiError: there is no such pod, or no right to run programs in it.
    """
    query = [("container", place.container), ("stdin", str(stdin).lower()), ("stdout", "true"), ("tty", str(tty).lower())]
    query += [("stderr", str(not tty).lower()), *(("command", part) for part in command)]
    # No pings: their answers stand behind what isn't read yet, and a slow disk would look like a broken connection.
    socket = await cluster.stream(path_of("Pod", place.namespace, place.pod, "exec"), query, PROTOCOLS, heartbeat=None)
    try:
        yield Program(place, socket)
    finally:
        await socket.close()


async def output_of(cluster: Cluster, place: Place, command: Sequence[str], *, seconds: float = 60.0) -> bytes:
    """What the program prints. Raises ProgramFailed when it ends with an error or takes longer than `seconds`."""
    output = []
    async with program(cluster, place, command, stdin=False) as running:
        try:
            async with asyncio.timeout(seconds):
                while data := await running.read():
                    output.append(data)
        except TimeoutError:
            raise ProgramFailed(f"pod {place.pod}: {command[0]} has not ended after {seconds:.0f} s") from None
        if running.code != 0:
            raise running.failure()
    return b"".join(output)
