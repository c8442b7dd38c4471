"""The agent's socket in a dev environment: people in the pod ask it for runs. Mode 0600, so only the pod's own user may.

A client says one JSON object a line: first `{"verb": "run" | "stop" | "env", …}`, later `{"interrupt": true}`. It hears `{"lines": […]}`
and at last `{"exitCode": 0, "message": ""}`. A client that goes away has interrupted its run: nothing runs on unseen, unless it was asked
for so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_gang.contract.interactive import Asked, Ended, Interrupted, Show
from lockstep_gang.contract.messages import AgentMessage
from lockstep_spec.codec import ContractError, from_json

LINE_BYTES_MAX = 1024 * 1024
BACKLOG_BYTES = 4 * 1024 * 1024
"""Size that a client may leave unread; more is left out, and the log has it."""


@dataclass(frozen=True)
class ClientRequest:
    """The first line of a client."""

    verb: str
    command: tuple[str, ...] = ()
    folder: str = ""
    by: str = ""
    detached: bool = False


class ClientConnection:
    """One connection; `asked` is sent again when the coordinator's was lost."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.asked: Asked | None = None
        self._left_out = 0

    def say(self, value: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(value).encode() + b"\n")

    def show(self, lines: tuple[str, ...]) -> None:
        if self._writer.transport.get_write_buffer_size() > BACKLOG_BYTES:
            self._left_out += len(lines)
            return
        if self._left_out:
            lines = (
                f"[lockstep] {self._left_out} lines left out: they came too fast to be shown here; the agent's log has them",
                *lines,
            )
            self._left_out = 0
        self.say({"lines": lines})


class RequestSocket:
    """Socket that takes clients in, passes on what they want, and tells them how it ends."""

    def __init__(self, path: Path, place: str, send: Callable[[AgentMessage], None], environment: Callable[[], dict[str, str]]) -> None:
        self._path, self._place, self._send, self._environment = path, place, send, environment
        self._clients: dict[str, ClientConnection] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises OSError."""
        self._path.unlink(missing_ok=True)  # of an agent before this one
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._accepted, str(self._path), limit=LINE_BYTES_MAX)
        finally:
            os.umask(mask)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for connection in self._connections:
            connection.cancel()

    def take(self, order: Show | Ended) -> None:
        client = self._clients.get(order.id)
        if client is None:
            return
        if isinstance(order, Show):
            client.show(order.lines)
        else:
            del self._clients[order.id]
            client.say({"exitCode": order.exit_code, "message": order.message})

    def connected(self) -> None:
        """Send the running requests again: the coordinator is heard again, and may be another one."""
        for client in self._clients.values():
            if client.asked is not None:
                self._send(client.asked)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client, own = ClientConnection(writer), os.urandom(8).hex()
        try:
            request = from_json(ClientRequest, json.loads(await reader.readline()), "the request")
            await self._answer(request, client, own, reader)
        except (ValueError, RecursionError) as error:  # ContractError is one
            client.say({"exitCode": 2, "message": str(error)})
        except OSError:
            pass  # the client is gone
        finally:
            if self._clients.pop(own, None) is not None and not (client.asked is not None and client.asked.detached):
                self._send(Interrupted(own, "the shell that started it is gone"))
            writer.close()

    async def _answer(self, request: ClientRequest, client: ClientConnection, own: str, reader: asyncio.StreamReader) -> None:
        if request.verb == "env":
            client.say({"environment": self._environment(), "exitCode": 0, "message": ""})
            return
        by = f"{request.by or 'a shell'} on {self._place}"
        self._clients[own] = client
        if request.verb == "stop":
            self._send(Interrupted("", f"{by} asked for it", own))
        elif request.verb == "run" and request.command:
            asked = Asked(own, request.command, request.folder, by, request.detached)
            self._send(asked)
            client.asked = Asked(own, request.command, request.folder, by, request.detached, again=True)
        else:
            del self._clients[own]
            raise ContractError(f"a request is run with a command, stop or env, not {request.verb!r}")
        await self._listen(own, reader)

    async def _listen(self, own: str, reader: asyncio.StreamReader) -> None:
        """Take interrupts until the client is gone: it goes once it has heard the end."""
        while line := await reader.readline():
            with contextlib.suppress(ValueError, AttributeError):
                if json.loads(line).get("interrupt") and own in self._clients:
                    self._send(Interrupted(own, "interrupted by the user who started it"))
