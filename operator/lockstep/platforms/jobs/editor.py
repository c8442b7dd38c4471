"""A server for an editor in a pod or on a host, and the way to it: they begin and end together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE
from lockstep.kube.cluster import Cluster
from lockstep.platforms.clusters.listings import may
from lockstep.platforms.inpod import editor, source_of
from lockstep.programs import STDERR, Place, Program, ProgramFailed, answer_of, kept_alive, python_program

BEAT_SECONDS = 15.0
END_SECONDS = 15.0
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

    def address(self, port: int) -> str:
        """Address on this machine of a server that is forwarded to `port`, with its token."""
        opens = f"folder={quote(self.folder, safe='/')}&" if self.kind == "vscode" else ""
        return f"http://127.0.0.1:{port}/?{opens}token={self.token}"


class ProgramMissing(Failed):
    """There is no program of this kind in the pod or on the host."""


def attach_uri(context: str, namespace: str, pod: str, container: str, image: str, folder: str) -> str:
    """Address of a folder in a pod, as the desktop's VS Code knows it with its extension Dev Containers (and shows it for an open
    window).
    """
    parts = {"context": context, "podname": pod, "namespace": namespace, "name": container, "image": image}
    authority = "+".join(["k8s-container", *(f"{key}={quote(value, safe='')}" for key, value in parts.items())])
    return f"vscode-remote://{authority}{quote(folder, safe='/')}"


async def refuse_without_rights(cluster: Cluster, namespace: str) -> None:
    """Refuse before anything is started. Raises ConfigError that names the right that is missing."""
    for subresource, what in (("exec", "run programs in pods"), ("portforward", "reach ports of pods")):
        if not await may(cluster, "create", "Pod", namespace, subresource):
            raise ConfigError(
                f"you may not {what} of namespace {namespace} (pods/{subresource}): ask an administrator for the role edit there"
            )


class EditorServer:
    """A server that runs there: the port on which it listens there, and the reason of its end."""

    def __init__(self, session: Program, port: int, ended: asyncio.Task[str]) -> None:
        self.port = port
        self._session = session
        self._ended = ended

    async def until_end(self) -> str:
        """Wait for its end, and return the reason, or '' if it ended by itself and well. Raises Failed when the connection broke."""
        return await self._ended


@asynccontextmanager
async def served(place: Place, requested: EditorRequest, echo: Say) -> AsyncIterator[EditorServer]:
    """Start the server and wait until it listens; leaving ends it, and all that it has started. Raises ProgramMissing, or Failed with its
    last lines.
    """
    source = source_of(editor)
    request = {
        "kind": requested.kind,
        "folder": requested.folder,
        "command": requested.command,
        "cwd": requested.cwd,
        "onHost": requested.on_host,
        "token": requested.token,
        "source": source.decode(),
    }
    async with (
        python_program(place, source, options=(), pings=True) as session,
        kept_alive(session, b"on\n", BEAT_SECONDS),
    ):
        await session.write(json.dumps(request).encode() + b"\n")
        listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        missing = asyncio.Event()
        ended = asyncio.create_task(_hear(session, listens, missing, echo))
        try:
            waited: list[asyncio.Future[Any]] = [listens, ended]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not listens.done():
                why = f"{requested.kind} in {place.name} did not start: {await ended or 'it ended at once'}"
                raise ProgramMissing(why) if missing.is_set() else Failed(why)
            yield EditorServer(session, listens.result(), ended)
        finally:
            await _end(session, ended)


async def _hear(session: Program, listens: asyncio.Future[int], missing: asyncio.Event, echo: Say) -> str:
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
            port = answer.get("port")
            if isinstance(port, int) and 0 < port < 1 << 16 and not listens.done():
                listens.set_result(port)
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
