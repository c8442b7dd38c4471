"""A server for an editor in a pod or on a host, and the way to it: they begin and end together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE
from lockstep.api.objects import Object
from lockstep.kube.aim import Kubeconfig, environment_kubeconfig
from lockstep.kube.cluster import Cluster
from lockstep.kube.forward import is_own, listening
from lockstep.kube.kubeconfig import chosen_context
from lockstep.platforms.clusters.listings import may
from lockstep.platforms.inpod import editor, source_of
from lockstep.programs import STDERR, Place, Program, ProgramFailed, answer_of, kept_alive, meanwhile, python_program
from lockstep_spec.codec import to_json

BEAT_SECONDS = 15.0
END_SECONDS = 15.0
RELEASE_SECONDS = 3.0
"""Time within which an editor that comes again finds its connection before ended."""
ANSWER_BYTES_MAX = 1 << 18
WORDS_MAX = 20_000
Say = Callable[[str], None]


@dataclass(frozen=True)
class EditorRequest:
    """Server to start, and its subject."""

    kind: str
    """jupyter, tensorboard, vscode or debug."""
    folder: str = WORKSPACE
    command: tuple[str, ...] = ()
    """Script and its arguments, with kind debug."""
    cwd: str = WORKSPACE
    on_host: bool = False
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    name: str = field(default_factory=lambda: f"lockstep-{secrets.token_hex(6)}.localhost")
    """Name of this machine for this server alone, so that its cookies are."""

    def address(self, port: int) -> str:
        """Address on this machine of a server that is forwarded to `port`, with its token."""
        opens = f"folder={quote(self.folder, safe='/')}&" if self.kind == "vscode" else ""
        return f"http://{self.name}:{port}/?{opens}token={self.token}"


class ProgramMissing(Failed):
    """There is no program of this kind in the pod or on the host."""


def attach_uri(context: str, namespace: str, pod: str, container: str, image: str, folder: str) -> str:
    """Address of a folder in a pod, as the desktop's VS Code knows it with its extension Dev Containers (and shows it for an open
    window).
    """
    parts = {"context": context, "podname": pod, "namespace": namespace, "name": container, "image": image}
    authority = "+".join(["k8s-container", *(f"{key}={quote(value, safe='')}" for key, value in parts.items())])
    return f"vscode-remote://{authority}{quote(folder, safe='/')}"


def attach_command(files: Kubeconfig, context: str | None, pod: Object, container: str, folder: str) -> str:
    """Return the command that opens a folder of a pod in the VS Code of this machine; "" where the kubeconfig has no context."""
    chosen, _ = chosen_context(files.paths, context)
    if chosen is None:
        return ""
    image = next(one["image"] for one in pod["spec"]["containers"] if one["name"] == container)
    uri = attach_uri(chosen, pod["metadata"]["namespace"], pod["metadata"]["name"], container, image, folder)
    command = shlex.join(["code", "--folder-uri", uri])
    return command if files.paths == environment_kubeconfig().paths else f"KUBECONFIG={shlex.quote(files.paths)} {command}"


async def refuse_without_rights(cluster: Cluster, namespace: str) -> None:
    """Refuse before anything is started. Raises ConfigError that names the right that is missing."""
    for subresource, what in (("exec", "run programs in pods"), ("portforward", "reach ports of pods")):
        if not await may(cluster, "create", "Pod", namespace, subresource):
            raise ConfigError(
                f"you may not {what} of namespace {namespace} (pods/{subresource}): ask an administrator for the role edit there"
            )


@asynccontextmanager
async def served(place: Place, requested: EditorRequest, echo: Say) -> AsyncIterator[tuple[int | str, asyncio.Task[str]]]:
    """Start the server and wait until it listens; leaving ends it, and all that it has started. Yield the port or socket at which it
    listens there, and a task that returns why it ended: '' if by itself and well; it raises Failed when the connection broke.

    Raises ProgramMissing, or Failed with its last lines.
    """
    source = source_of(editor)
    request = {**to_json(requested), "source": source.decode()}
    async with (
        python_program(place, source, options=(), pings=True) as session,
        kept_alive(session, b"on\n", BEAT_SECONDS),
    ):
        await session.write(json.dumps(request).encode() + b"\n")
        listens: asyncio.Future[int | str] = asyncio.get_running_loop().create_future()
        missing = asyncio.Event()
        ended = asyncio.create_task(_hear(session, listens, missing, echo))
        try:
            waited: list[asyncio.Future[Any]] = [listens, ended]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not listens.done():
                why = f"{requested.kind} in {place.name} did not start: {await ended or 'it ended at once'}"
                raise ProgramMissing(why) if missing.is_set() else Failed(why)
            yield listens.result(), ended
        finally:
            await _end(session, ended)


@asynccontextmanager
async def piped(place: Place, at: str, local: int, say: Say) -> AsyncIterator[int]:
    """Yield a port of this machine, `local` or another free one, that leads a debugger's editor to a socket or a port of loopback there."""
    one = asyncio.Lock()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not is_own(writer.get_extra_info("peername"), writer.get_extra_info("sockname")):
            return say("a connection of another user of this machine was refused")
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await one.acquire()
        except TimeoutError:
            return say("a second connection was refused: the debugger has one editor")
        try:
            async with (
                python_program(place, source_of(editor), "pipe", at, options=(), pings=True) as program,
                meanwhile(_written(reader, program)) as written,
                meanwhile(_passed_on(program, writer)) as passed_on,
            ):
                ended, _ = await asyncio.wait({written, passed_on}, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        except (Failed, OSError) as error:
            say(f"the debugger's connection ended: {error}")
        finally:
            one.release()

    async with listening(carry, local) as chosen:
        yield chosen


# Neither end of a debugger's connection is trusted. Pages of a browser reach ports of this machine, too: so what is no frame of the Debug
# Adapter Protocol, such as a request of HTTP, ends the connection. And editors do what an adapter asks them to, such as to run a command in
# a terminal here: so of the pod or the host only answers and the protocol's own events come through.

END, HEAD_BYTES_MAX = b"\r\n\r\n", 64
HEAD = re.compile(rb"Content-Length: (\d{1,8})\r\n\r\n")
EVENTS = frozenset({
    "initialized", "stopped", "continued", "exited", "terminated", "thread", "output", "breakpoint", "module", "loadedSource", "process",
    "capabilities", "progressStart", "progressUpdate", "progressEnd", "invalidated", "memory",
})  # fmt: skip


async def frames(read: Callable[[], Awaitable[bytes]], whose: str) -> AsyncIterator[bytes]:
    """Frames until `read` has no more. Raises Failed for anything else."""
    data = bytearray()
    while True:
        while (end := data.find(END)) < 0 and len(data) < HEAD_BYTES_MAX and (more := await read()):
            data += more
        if end < 0 and not data:
            return
        size = HEAD.fullmatch(data, 0, end + len(END))
        if size is None:
            raise Failed(f"{whose} does not speak the Debug Adapter Protocol: it says {bytes(data[:40])!r}")
        length = size.end() + int(size[1])
        while len(data) < length and (more := await read()):
            data += more
        if len(data) < length:
            return
        yield bytes(data[:length])
        del data[:length]


def may_pass(frame: bytes) -> bool:
    """Return True if a frame of the pod or the host asks nothing of the editor."""
    try:
        message = json.loads(frame.partition(END)[2])
    except (ValueError, RecursionError):
        return False
    if not isinstance(message, dict):
        return False
    return message.get("type") == "response" or (message.get("type") == "event" and message.get("event") in EVENTS)


async def _written(reader: asyncio.StreamReader, program: Program) -> None:
    async for frame in frames(lambda: reader.read(1 << 16), "what has connected"):
        await program.write(frame)


async def _passed_on(program: Program, writer: asyncio.StreamWriter) -> None:
    async for frame in frames(program.read, program.place.name):
        if may_pass(frame):
            writer.write(frame)
            await writer.drain()
    if program.code:
        raise program.failure()


async def _hear(session: Program, listens: asyncio.Future[int | str], missing: asyncio.Event, echo: Say) -> str:
    """Read its answers to the end, and return why it ended."""
    buffered, why = bytearray(), ""
    async for channel, data in session.output():
        if channel == STDERR:
            echo(data.decode(errors="replace"))
            continue
        buffered += data
        if len(buffered) > ANSWER_BYTES_MAX:
            raise ProgramFailed(f"python3 in {session.place.name} doesn't end its answer: check the image's python3")
        *lines, buffered = buffered.split(b"\n")
        for line in lines:
            answer = answer_of(bytes(line), session.place.name)
            port, path = answer.get("port"), answer.get("socket")
            if isinstance(port, int) and 0 < port < 1 << 16 and not listens.done():
                listens.set_result(port)
            elif isinstance(path, str) and not listens.done():
                listens.set_result(path)
            elif "failed" in answer or answer.get("ended"):
                if answer.get("lacks"):
                    missing.set()
                reason = str(answer.get("failed") or f"it ended with exit code {answer['ended']}")
                words = answer.get("said")
                why = " | ".join([reason, *map(str, words if isinstance(words, list) else ())])[:WORDS_MAX]
    return why


async def _end(session: Program, ended: asyncio.Task[str]) -> None:
    """Ask the server to end, and wait until it has; the end of the connection asks once more."""
    with contextlib.suppress(OSError, Failed, TimeoutError):
        if not ended.done():
            await session.write(b"end\n")
        async with asyncio.timeout(END_SECONDS):
            await asyncio.shield(ended)
    ended.cancel()
    await asyncio.gather(ended, return_exceptions=True)
