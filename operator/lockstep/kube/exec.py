"""Programs in pods: what `kubectl exec` does, by websocket, with both directions at once and no more in memory than a few frames."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from lockstep.api.sccs import scc_refusal
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, PING_SECONDS, ApiError, Cluster
from lockstep.kube.kinds import path_of
from lockstep.programs import STDERR, STDOUT, WORDS_MAX, Broken, NotStarted, Program, ProgramFailed

STDIN, STATUS, RESIZE, CLOSE = 0, 3, 4, 255
V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
FRAME_BYTES = 1 << 18
AGAIN_SECONDS, AGAIN_POLL_SECONDS = 30.0, 0.5
"""For how long, and how often, a follower looks again at a container that doesn't run: its kubelet says within seconds what became of it.
"""
_NOT_RUNNING = re.compile(
    r"container not found|pod does not exist|in a completed pod|does not have a host assigned"  # kubelet and API server
    r"|container is in CONTAINER_\w+ state|no running task found|failed to find container"  # containerd
    r"|container is not created or running|container \S+ is not running"  # CRI-O and crun, Docker
    r"|cannot exec (in )?a (stopped |container that has )|procReady not received|ttrpc: closed",  # runc and its shim
    re.IGNORECASE,
)


class NotRunning(NotStarted):
    """The container has ended since somebody looked at its pod, or is about to start: a follower looks again (`looks_again`)."""


async def looks_again(since: float) -> bool:
    """Wait a moment after NotRunning, and return True if another look is due; False after AGAIN_SECONDS. `since`: the first look, by
    time.monotonic().
    """
    await asyncio.sleep(AGAIN_POLL_SECONDS)
    return time.monotonic() - since < AGAIN_SECONDS


@dataclass(frozen=True)
class PodPlace:
    """A running container, as a place where programs can run."""

    cluster: Cluster = field(compare=False, repr=False)
    namespace: str
    pod: str
    container: str
    python: Sequence[str] = ("python3",)

    @property
    def name(self) -> str:
        return f"pod {self.pod}"

    @asynccontextmanager
    async def program(
        self, command: Sequence[str], *, stdin: bool = True, tty: bool = False, pings: bool = False
    ) -> AsyncIterator[PodProgram]:
        """Start `command` in the container. Proxies cut silent connections, so `pings` are websocket's.

        Raises:
            NotRunning: there is no such pod, or its container doesn't run.
            NotStarted: no right to run programs in it.
        """
        query = [("container", self.container), ("stdin", str(stdin).lower()), ("stdout", "true"), ("tty", str(tty).lower())]
        query += [("stderr", str(not tty).lower()), *(("command", part) for part in command)]
        path = path_of("Pod", self.namespace, self.pod, "exec")
        try:
            socket = await self.cluster.stream(path, query, (V5, V4), heartbeat=PING_SECONDS if pings else None)
        except ApiError as error:
            raise refused(error, self.namespace, self.pod, "run programs in pods", "pods/exec") from None
        try:
            yield PodProgram(self, socket)
        finally:
            await socket.close()


class PodProgram(Program):
    """A program in a pod, over a websocket."""

    def __init__(self, place: PodPlace, socket: Any) -> None:
        super().__init__(place)
        self._socket = socket

    async def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            for start in range(0, len(view), FRAME_BYTES):
                await self._socket.send_bytes(bytes([STDIN]) + view[start : start + FRAME_BYTES])
        except (OSError, RuntimeError) as error:
            raise Broken(f"the connection to {self.place.name} broke: {error}") from error

    async def close_stdin(self) -> bool:
        """Close its standard input. Return False if the API server is older than 1.30 and can't pass that on."""
        if self._socket.protocol == V5:
            await self._socket.send_bytes(bytes([CLOSE, STDIN]))
        return bool(self._socket.protocol == V5)

    async def resize(self, columns: int, lines: int) -> None:
        await self._socket.send_bytes(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": lines}).encode())

    def failure(self) -> ProgramFailed:
        if _NOT_RUNNING.search(self.not_started):
            return _not_running(self.place.name, self.not_started)
        return super().failure()

    async def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        async for message in self._socket:
            if not isinstance(message.data, bytes) or len(message.data) < 2:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == STATUS:
                self.code, self.not_started = _parsed_ending(data)
            elif channel in (STDOUT, STDERR):
                yield channel, data


def _parsed_ending(data: bytes) -> tuple[int, str]:
    try:
        return ending_of(json.loads(data))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return 1, "its connection ended with a status that can't be read"


def ending_of(status: dict[str, Any]) -> tuple[int, str]:
    """Exit code of the program as the kubelet reports it, and the reason why it did not start, or ''."""
    if status.get("status") == "Success":
        return 0, ""
    for cause in (status.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode" and str(cause.get("message")).isdecimal():
            return int(cause["message"]), ""
    return 1, " ".join(str(status.get("message") or "no reason is told")[:WORDS_MAX].split())


def _not_running(name: str, words: str) -> NotRunning:
    return NotRunning(f"the container of {name} has ended, or doesn't run yet: {words}")


def refused(error: ApiError, namespace: str, pod: str, what: str, right: str) -> NotStarted:
    """Error for a request to a pod that was refused, with what to do."""
    if by_scc := scc_refusal(error.message, namespace):
        return NotStarted(
            f"you may not {what} that neither you nor their service account may create: {pod} -n {namespace}: {': '.join(by_scc)}"
        )
    if error.status == FORBIDDEN:
        return NotStarted(f"you may not {what} of namespace {namespace} ({right}): ask an administrator for the role edit there")
    if error.status == NOT_FOUND:
        return NotRunning(f"pod {pod} no longer exists in namespace {namespace}")
    if _NOT_RUNNING.search(error.message):
        return _not_running(f"pod {pod}", error.message)
    return NotStarted(f"the cluster doesn't let you {what}: pod {pod} of namespace {namespace}: {error}")
