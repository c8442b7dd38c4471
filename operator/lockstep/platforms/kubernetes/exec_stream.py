"""A program in a pod, with its standard streams: exec over one WebSocket, whose first byte in every message is the channel."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from lockstep.api.errors import Failed
from lockstep.api.names import CONTAINER
from lockstep.platforms.kubernetes.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster, path_of

STDIN, STDOUT, STDERR, ENDED, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
FRAME_BYTES = 1 << 16


class Exec:
    """One running program. Iterate over it for (channel, bytes) of what it prints; then `code` is its exit code."""

    def __init__(self, socket: Any, pod: str) -> None:
        self._socket = socket
        self._pod = pod
        self.code: int | None = None

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), FRAME_BYTES):
            await self._socket.send_bytes(bytes([STDIN]) + data[start : start + FRAME_BYTES])

    async def end_of_input(self) -> bool:
        """Let the program read to the end. False: Kubernetes before 1.30 has no way to say so."""
        if self._socket.protocol == V5:
            await self._socket.send_bytes(bytes([CLOSE, STDIN]))
        return bool(self._socket.protocol == V5)

    async def resize(self, columns: int, rows: int) -> None:
        await self._socket.send_bytes(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": rows}).encode())

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        from aiohttp import WSMsgType

        async for message in self._socket:
            if message.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
                break
            data = message.data if isinstance(message.data, bytes) else message.data.encode()
            if not data:
                continue
            if data[0] == ENDED:
                self.code = exit_code(json.loads(data[1:] or b"{}"), self._pod)
            elif data[0] in (STDOUT, STDERR) and len(data) > 1:
                yield data[0], data[1:]
        if self.code is None:
            raise Failed(f"the connection to pod {self._pod} broke")


def exit_code(status: dict[str, Any], pod: str) -> int:
    """Of the program, as the kubelet tells it. Raises Failed where it could not be started."""
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise Failed(f"nothing could be started in pod {pod}: {' '.join(str(status.get('message', 'no reason is told')).split())}")


@asynccontextmanager
async def running(cluster: Cluster, namespace: str, pod: str, command: Sequence[str], *, tty: bool = False) -> AsyncIterator[Exec]:
    """Start it in the trainer's container. Leaving closes the connection; its standard input ends then. Raises Failed, OSError."""
    streams = {"container": CONTAINER, "stdin": "true", "stdout": "true", "stderr": str(not tty).lower(), "tty": str(tty).lower()}
    query = [*(("command", word) for word in command), *streams.items()]
    try:
        socket = await cluster.stream(path_of("Pod", namespace, pod, "exec"), query, (V5, V4))
    except ApiError as error:
        raise refused(error, namespace, pod, "run programs in pods", "pods/exec") from None
    try:
        yield Exec(socket, pod)
    finally:
        await socket.close()


def refused(error: ApiError, namespace: str, pod: str, what: str, right: str) -> Failed:
    """In one sentence, with what to do."""
    if error.status == FORBIDDEN:
        return Failed(f"you may not {what} of namespace {namespace} ({right}): an administrator gives you the role edit there")
    if error.status == NOT_FOUND:
        return Failed(f"there is no pod {pod} in namespace {namespace} any more")
    return Failed(f"the cluster doesn't let you {what}: pod {pod} of namespace {namespace}: {error}")
