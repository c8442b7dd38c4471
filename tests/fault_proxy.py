"""A proxy in front of the API server that numbers the operator's writes and lets one of them go wrong in a chosen way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from counting_proxy import CountingProxy


@dataclass
class Write:
    """One write of the operator; `status` is the API server's answer, None when it never got there."""

    method: str
    path: str
    name: str
    """Of the object in its body."""
    status: int | None = None

    @property
    def is_committed(self) -> bool:
        return self.status is not None and self.status < 300


@dataclass(frozen=True)
class Fault:
    """What becomes of one write. At most one of the fields is set."""

    before: Callable[[], None] | None = None
    """Called instead of forwarding it; nobody answers."""
    after: Callable[[], None] | None = None
    """Called once the API server has committed it; nobody answers."""
    refuse: int | None = None
    """Answered with this code instead of being forwarded."""


class FaultProxy(CountingProxy):
    """Writes to one namespace are numbered from 0 since `arm`; each number has at most one fault, which happens once."""

    def __init__(self, upstream: Path) -> None:
        super().__init__(upstream)
        self.writes: list[Write] = []
        self._namespace = ""
        self._faults: dict[int, Fault] = {}
        self._watches: set[asyncio.Transport] = set()

    def arm(self, namespace: str, faults: dict[int, Fault]) -> None:
        self.writes, self._namespace, self._faults = [], namespace, dict(faults)

    @property
    def is_over(self) -> bool:
        """Whether every fault has happened."""
        return not self._faults

    def cut_watches(self) -> None:
        for transport in list(self._watches):
            self._loop.call_soon_threadsafe(transport.abort)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await self._read(request)
        if f"/namespaces/{self._namespace}/" not in request.path:
            return await super()._pass(request)
        write = Write(request.method, request.path, _name(await request.read()))
        fault = self._faults.pop(len(self.writes), Fault())
        self.writes.append(write)
        if fault.refuse is not None:
            return _refusal(fault.refuse)
        if fault.before is not None:
            return _unanswered(request, fault.before)
        reply = await self._ask(request)
        write.status = reply.status
        return reply if fault.after is None else _unanswered(request, fault.after)

    async def _read(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if "watch" not in request.query or not isinstance(transport, asyncio.Transport):
            return await super()._pass(request)
        self._watches.add(transport)
        try:
            return await super()._pass(request)
        finally:
            self._watches.discard(transport)


def _name(body: bytes) -> str:
    return str((json.loads(body).get("metadata") or {}).get("name", "")) if body else ""


def _refusal(code: int) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Injected", "message": "a fault of the test", "code": code}
    return web.json_response(body, status=code)


def _unanswered(request: web.Request, act: Callable[[], None]) -> web.Response:
    act()
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
