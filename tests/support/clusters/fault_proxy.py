"""A proxy in front of the API server that numbers the operator's writes and lets one of them go wrong in a chosen way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from support.clusters.counting_proxy import CountingProxy


@dataclass
class Write:
    """One write of the operator; `status` is the API server's answer, None when it never got there."""

    method: str
    path: str
    name: str
    """Name of the object in its body."""
    status: int | None = None

    @property
    def is_committed(self) -> bool:
        return self.status is not None and self.status < 300


@dataclass(frozen=True)
class Fault:
    """Fate of one write. At most one of the fields is set."""

    before: Callable[[], None] | None = None
    """Called instead of forwarding it; nobody answers."""
    after: Callable[[], None] | None = None
    """Called once the API server has committed it; nobody answers."""
    refuse: int | None = None
    """Answered with this code instead of being forwarded; 429 asks for a second's patience."""


class FaultProxy(CountingProxy):
    """Writes to one namespace are numbered from 0 since `arm`; each number has at most one fault, which happens once.

    A write that is sent again because it did not come to anything has no new number: the next one is the next step.
    """

    def __init__(self, upstream: Path) -> None:
        super().__init__(upstream)
        self.writes: list[Write] = []
        self._namespace = ""
        self._faults: dict[int, Fault] = {}
        self._written = threading.Event()
        self._numbered: set[tuple[Any, ...]] = set()
        self._watches: set[asyncio.Transport] = set()
        self._watched_paths: set[str] = set()
        self._gone: set[str] = set()
        """Paths whose next watch begins at a version that the API server doesn't have any more."""

    def arm(self, namespace: str, faults: dict[int, Fault]) -> None:
        self.writes, self._namespace, self._faults, self._numbered = [], namespace, dict(faults), set()

    @property
    def steps(self) -> int:
        """Writes that have a number."""
        return len(self._numbered)

    @property
    def left(self) -> int:
        """Faults that have not happened."""
        return len(self._faults)

    def wait(self, seconds: float) -> bool:
        """Wait so long for an answer to a write; return True if there was one since the last call."""
        is_written = self._written.wait(seconds)
        self._written.clear()
        return is_written

    def cut_watches(self) -> None:
        for transport in list(self._watches):
            self._loop.call_soon_threadsafe(transport.abort)

    def expire_watches(self) -> None:
        """Cut them, and let none go on where it was: 410 Gone."""
        self._gone = set(self._watched_paths)
        self.cut_watches()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await self._read(request)
        try:
            return await self._write(request)
        finally:
            self._written.set()

    async def _write(self, request: web.Request) -> web.StreamResponse:
        if f"/namespaces/{self._namespace}/" not in request.path:
            return await super()._pass(request)
        write = Write(request.method, request.path, _name(await request.read()))
        fault = self._fault(write)
        self.writes.append(write)
        if fault.refuse is not None:
            return _refusal(fault.refuse)
        if fault.before is not None:
            return _unanswered(request, fault.before)
        reply = await self._ask(request)
        write.status = reply.status
        return reply if fault.after is None else _unanswered(request, fault.after)

    def _fault(self, write: Write) -> Fault:
        """Choose the fault by how often the same was written before: a status is written again and again, and each time it is another
        step.
        """
        same = (write.method, write.path, write.name)
        step = (*same, sum((w.method, w.path, w.name) == same and w.is_committed for w in self.writes))
        if step in self._numbered or (write.method == "POST" and step[-1]):
            return Fault()
        self._numbered.add(step)
        return self._faults.pop(len(self._numbered) - 1, Fault())

    async def _read(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if "watch" not in request.query or not isinstance(transport, asyncio.Transport):
            return await super()._pass(request)
        self._watched_paths.add(request.path)
        if "resourceVersion" in request.query and request.path in self._gone:
            self._gone.discard(request.path)
            gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"}
            return web.json_response({"type": "ERROR", "object": gone})
        self._watches.add(transport)
        try:
            return await super()._pass(request)
        finally:
            self._watches.discard(transport)


def _name(body: bytes) -> str:
    return str((json.loads(body).get("metadata") or {}).get("name", "")) if body else ""


def _refusal(code: int) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Injected", "message": "a fault of the test", "code": code}
    return web.json_response(body, status=code, headers={"Retry-After": "1"} if code == 429 else {})


def _unanswered(request: web.Request, act: Callable[[], None]) -> web.Response:
    act()
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
