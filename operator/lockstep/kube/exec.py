"""Programs in pods: what `kubectl exec` does, by websocket, with both directions at once and no more in memory than a few frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.api.errors import Failed
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, PING_SECONDS, ApiError, Cluster
from lockstep.kube.kinds import path_of

STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
FRAME_BYTES = 1 << 18
_REMEMBERED_BYTES = 1 << 16
_WORDS_MAX = 2000
LINE_BYTES_MAX = 4 << 20
OUTPUT_BYTES_MAX = 16 << 20
"""Limit of output that is collected: what a pod prints must not fill this machine's memory."""
BOOT = "import os, sys\nn, text = int(sys.argv.pop(1)), b''\nwhile len(text) < n:\n text += os.read(0, n - len(text)) or sys.exit('no program came')\nexec(compile(text, 'lockstep', 'exec'))"
"""`python3 -c BOOT <bytes> …` runs the program of that many bytes that comes first on standard input. A command is part of the request's URL, and
some proxies refuse a URL of a program's size."""


class Place(NamedTuple):
    """A running container."""

    namespace: str
    pod: str
    container: str


class ProgramFailed(Failed):
    """A program in a pod ended with an error, or its connection broke. The message has the last lines of its standard error."""


class Broken(ProgramFailed):
    """The connection broke; the program may have ended, or run on."""


class NotStarted(ProgramFailed):
    """The program did not start: no right to run it, no such pod, or no such command in the container. The message says which."""


@dataclass
class Program:
    """A program that runs in a pod: bytes to it, bytes from it. The end of its standard error is kept for the message when it fails."""

    place: Place
    _socket: Any
    errors: bytes = b""
    code: int | None = field(default=None)
    """Exit code; None: the connection ended before the program's end was reported."""
    _not_started: str = ""

    async def write(self, data: bytes | memoryview) -> None:
        """Write to its standard input, and wait while the other side is slower. Raises Broken when it can't be reached."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), FRAME_BYTES):
                await self._socket.send_bytes(bytes([STDIN]) + view[start : start + FRAME_BYTES])
        except (OSError, RuntimeError) as error:
            raise Broken(f"the connection to pod {self.place.pod} broke: {error}") from error

    async def close_stdin(self) -> bool:
        """Close its standard input. Return False if the API server is older than 1.30 and can't pass that on."""
        if self._socket.protocol == V5:
            await self._socket.send_bytes(bytes([CLOSE, STDIN]))
        return bool(self._socket.protocol == V5)

    async def resize(self, columns: int, lines: int) -> None:
        await self._socket.send_bytes(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": lines}).encode())

    async def read(self) -> bytes:
        """Next bytes of its standard output; b"" at the end."""
        async for channel, data in self._frames():
            if channel == STDOUT:
                return data
        return b""

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        """Pairs of STDOUT or STDERR and what was printed there, in the order in which it came. At the end `code` says how the program ended.

        Raises Broken where nobody knows how, NotStarted where it never ran.
        """
        async for channel, data in self._frames():
            if channel in (STDOUT, STDERR):
                yield channel, data
        if self.code is None or self._not_started:
            raise self.failure()

    async def _frames(self) -> AsyncIterator[tuple[int, bytes]]:
        async for message in self._socket:
            if not isinstance(message.data, bytes) or len(message.data) < 2:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == STDERR:
                self.errors = (self.errors + data)[-_REMEMBERED_BYTES:]
            elif channel == STATUS:
                self.code, self._not_started = _parsed_ending(data)
            yield channel, data

    def failure(self) -> ProgramFailed:
        """Exception to raise when the program ended too early or with an error."""
        pod = self.place.pod
        if self._not_started:
            return NotStarted(f"no program could be started in pod {pod}: {self._not_started}")
        message = " | ".join(self.errors.decode(errors="replace").strip().splitlines()[-3:])[-_WORDS_MAX:]
        if self.code is None:
            return Broken(f"the connection to pod {pod} broke{message and f', after: {message}'}")
        return ProgramFailed(f"pod {pod}: {message or f'it ended with {self.code}'}")


def _parsed_ending(data: bytes) -> tuple[int, str]:
    try:
        return ending_of(json.loads(data))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return 1, "its connection ended with a status that can't be read"


async def lines_in(running: Program) -> AsyncIterator[bytes]:
    """Lines of its standard output; text without a line's end is none. Raises ProgramFailed for a line that is longer than any answer."""
    rest = bytearray()  # (bytes would be copied with each piece, however small)
    while data := await running.read():
        rest += data
        *whole, rest = rest.split(b"\n") if b"\n" in data else (rest,)
        if max(map(len, (*whole, rest))) > LINE_BYTES_MAX:
            raise ProgramFailed(
                f"pod {running.place.pod}: python3 prints a line of more than {LINE_BYTES_MAX} bytes, which is not a valid answer"
            )
        for line in whole:
            yield bytes(line)


def answer_of(text: bytes | str, pod: str) -> dict[str, Any]:
    """Object that a program printed as one line of JSON in `pod`.

    Raises ProgramFailed for anything else: whoever made the image decides what it prints.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        start = text[:100] if isinstance(text, str) else text[:100].decode(errors="replace")
        raise ProgramFailed(f"python3 in {pod} says {start!r}, which is not a valid answer")
    return answer


def ending_of(status: dict[str, Any]) -> tuple[int, str]:
    """Exit code of the program as the kubelet reports it, and the reason why it did not start, or ''."""
    if status.get("status") == "Success":
        return 0, ""
    for cause in (status.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode" and str(cause.get("message")).isdecimal():
            return int(cause["message"]), ""
    return 1, " ".join(str(status.get("message") or "no reason is told")[:_WORDS_MAX].split())


@asynccontextmanager
async def program(
    cluster: Cluster, place: Place, command: Sequence[str], *, stdin: bool = True, tty: bool = False, pings: bool = False
) -> AsyncIterator[Program]:
    """Start `command` in the container. The connection's end is the program's only where it reads its standard input.

    `pings` keep the connection of a silent program open through proxies, where all that it prints is read at once: their answers stand
    behind what isn't read yet, and a slow disk would look like a broken connection.

    Raises:
        NotStarted: there is no such pod, or no right to run programs in it.
    """
    query = [("container", place.container), ("stdin", str(stdin).lower()), ("stdout", "true"), ("tty", str(tty).lower())]
    query += [("stderr", str(not tty).lower()), *(("command", part) for part in command)]
    path = path_of("Pod", place.namespace, place.pod, "exec")
    try:
        socket = await cluster.stream(path, query, (V5, V4), heartbeat=PING_SECONDS if pings else None)
    except ApiError as error:
        raise refused(error, place.namespace, place.pod, "run programs in pods", "pods/exec") from None
    try:
        yield Program(place, socket)
    finally:
        await socket.close()


def refused(error: ApiError, namespace: str, pod: str, what: str, right: str) -> NotStarted:
    """Error for a request to a pod that was refused, with what to do."""
    if error.status == FORBIDDEN:
        return NotStarted(f"you may not {what} of namespace {namespace} ({right}): ask an administrator for the role edit there")
    if error.status == NOT_FOUND:
        return NotStarted(f"pod {pod} no longer exists in namespace {namespace}")
    return NotStarted(f"the cluster doesn't let you {what}: pod {pod} of namespace {namespace}: {error}")


async def output_of(
    cluster: Cluster, place: Place, command: Sequence[str], *, stdin: bytes = b"", seconds: float = 60.0, most: int = OUTPUT_BYTES_MAX
) -> bytes:
    """Output of the program. It must read `stdin` by its length: not every API server passes its end on.

    Raises ProgramFailed when it ends with an error, takes longer than `seconds` or prints more than `most` bytes.
    """
    output = bytearray()
    async with program(cluster, place, command, stdin=bool(stdin), pings=True) as running:
        try:
            async with asyncio.timeout(seconds):
                with suppress(Broken):  # (a program that ended before it had read all: what it said tells more)
                    await running.write(stdin)
                while data := await running.read():
                    output += data
                    if len(output) > most:
                        raise ProgramFailed(f"pod {place.pod}: {command[0]} prints more than {most} bytes, which is not a valid answer")
        except TimeoutError:
            raise ProgramFailed(f"pod {place.pod}: {command[0]} has not ended after {seconds:.0f} s") from None
        if running.code != 0:
            raise running.failure()
    return bytes(output)


def boot_command(source: bytes, *arguments: str, options: Sequence[str] = ("-I",)) -> list[str]:
    """Command that runs the Python program `source`, which is the first to be written to its standard input, with these arguments."""
    return ["python3", *options, "-c", BOOT, str(len(source)), *arguments]


@asynccontextmanager
async def kept_alive(running: Program, message: bytes, seconds: float) -> AsyncIterator[None]:
    """Write `message` every so many seconds meanwhile: the program ends when it has heard nothing for long, and proxies cut silent connections."""

    async def beat() -> None:
        with suppress(Failed):
            while True:
                await asyncio.sleep(seconds)
                await running.write(message)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


@asynccontextmanager
async def python_program(
    cluster: Cluster, place: Place, source: bytes, *arguments: str, options: Sequence[str] = ("-I",), pings: bool = False
) -> AsyncIterator[Program]:
    """Start a program of Lockstep's in the container; what is written to it then is its own standard input. Raises as `program` does, and Broken.

    `options`: of python3. -I keeps the container's variables and folders from changing what the program imports.
    """
    async with program(cluster, place, boot_command(source, *arguments, options=options), pings=pings) as running:
        await running.write(source)
        yield running


async def python_output(
    cluster: Cluster, place: Place, source: bytes, *arguments: str, seconds: float = 60.0, most: int = OUTPUT_BYTES_MAX
) -> bytes:
    """Output of a program of Lockstep's in the container. Raises as `output_of` does."""
    return await output_of(cluster, place, boot_command(source, *arguments), stdin=source, seconds=seconds, most=most)
