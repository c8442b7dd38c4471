"""A proxy in front of the API server that writes down every request: what was really sent, not what was meant."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from kubernetes.aio import client, config

HOP_HEADERS = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")


class CountingProxy:
    """Serves on loopback, as the administrator unless a request brings a token."""

    def __init__(self, upstream: Path) -> None:
        self._upstream = upstream
        self.requests: list[tuple[str, str]] = []
        """(method, path without query)"""
        self.watches = 0
        """Number of watches among them, all since the start."""
        self.port = 0

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._pass(request)
        except ConnectionResetError:  # who asked is gone
            return web.Response()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        async with await self._upstream_request(request) as reply:
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.headers.get("Content-Type", "")})
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            return response

    async def _ask(self, request: web.Request) -> web.Response:
        """The whole reply, before anything of it is passed on."""
        async with await self._upstream_request(request) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)

    async def _upstream_request(self, request: web.Request) -> Any:
        self.requests.append((request.method, request.path))
        self.watches += "watch" in request.query
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        session: aiohttp.ClientSession = self._rest.pool_manager or self._rest._create_pool_manager()
        self._rest.pool_manager = session
        return session.request(request.method, self._host + request.raw_path, headers=headers, data=await request.read() or None)

    async def _serve(self, started: threading.Event) -> None:
        configuration = client.Configuration()
        configuration.connection_pool_maxsize = 1000  # a dozen watches stay open
        await config.load_kube_config(str(self._upstream), client_configuration=configuration)
        self._host = configuration.host
        api = client.ApiClient(configuration)
        self._rest: Any = api.rest_client
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)  # watches stay open for minutes
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        started.set()
        await self._stop.wait()
        await runner.cleanup()
        await api.close()

    @contextmanager
    def running(self) -> Iterator[CountingProxy]:
        started = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        thread.start()
        try:
            assert started.wait(10)
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()

    def kubeconfig(self, folder: Path, token: str | None = None) -> Path:
        """A kubeconfig that leads here."""
        user = {"token": token} if token else {}
        path = folder / "kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "proxy",
                    "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "proxy", "user": user}],
                    "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
                }
            )
        )
        return path
