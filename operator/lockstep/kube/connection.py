"""HTTP and websockets to one API server, with the credentials of the kubeconfig or the pod's service account."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.kube.aim import Connections, Kubeconfig
from lockstep.kube.kubeconfig import IN_CLUSTER, Server, read_account, read_server
from lockstep_spec.files import expanded

UNAUTHORIZED = 401
READ_BYTES = 1 << 21
"""A watch's event is one line, and may be as large as an object."""

MESSAGE_BYTES_MAX = 16 << 20
"""Limit for messages of a websocket: API servers send some 32 KiB at a time, and an endless one would fill the memory."""
LARGE_CHARACTERS = 1 << 20
"""A larger body is sent in pieces, such as a ConfigMap with the agent: aiohttp warns that a whole one could hold up the event loop."""


class ApiConnection:
    """Sessions that are opened with the first request, in the event loop that this is made in."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._session: Any = None
        self._replaced: list[Any] = []

    async def close(self) -> None:
        for session in [*self._replaced, *filter(None, [self._session])]:
            await session.close()

    def _opened(self) -> Any:
        if self._session is None:
            self._session = session_to(self.server)
        return self._session

    async def _asked_as(self) -> dict[str, Any]:
        return {"headers": await headers_of(self.server), "proxy": self.server.proxy}

    async def _renewed(self, began: float) -> bool:
        """Return True if a request that was refused with 401 is worth another try. Connections that are open may have shown an old
        certificate.
        """
        if not await self.server.login.renew(began):
            return False
        if self._session is not None:
            self._replaced.append(self._session)  # others may still read from it
            self._session = None
        return True

    async def request(self, method: str, path: str, body: str | BytesIO | None, headers: dict[str, str], seconds: float | None) -> Any:
        """aiohttp's response, whatever its status."""
        from aiohttp import ClientTimeout

        if isinstance(body, str) and len(body) >= LARGE_CHARACTERS:
            body = BytesIO(body.encode())

        async def ask() -> Any:
            options = await self._asked_as()
            options["headers"].update(headers)
            return await self._opened().request(method, self.server.url + path, data=body, timeout=ClientTimeout(total=seconds), **options)

        began = time.monotonic()
        response = await ask()
        if response.status == UNAUTHORIZED and await self._renewed(began):
            response.release()
            if isinstance(body, BytesIO):
                body.seek(0)
            response = await ask()
        return response

    async def websocket(self, path: str, protocols: Sequence[str], heartbeat: float | None) -> Any:
        """aiohttp's websocket."""
        from aiohttp import WSServerHandshakeError

        async def ask() -> Any:
            options = await self._asked_as()
            return await self._opened().ws_connect(
                self.server.url + path, protocols=protocols, heartbeat=heartbeat, max_msg_size=MESSAGE_BYTES_MAX, **options
            )

        began = time.monotonic()
        try:
            return await ask()
        except WSServerHandshakeError as error:
            if error.status != UNAUTHORIZED or not await self._renewed(began):
                raise
        return await ask()


def session_to(server: Server, middlewares: Sequence[Any] = (), **options: Any) -> Any:
    """aiohttp's session with the server's TLS, and its name there."""
    from aiohttp import ClientSession, TCPConnector
    from aiohttp.connector import NEEDS_CLEANUP_CLOSED

    async def name_server(request: Any, handler: Any) -> Any:
        request.server_hostname = server.tls_name
        return await handler(request)

    mend_abort(sys.version_info[:3])
    # Python before 3.12.8 leaves the socket open when TLS over it ended in disorder: at the end of such a session they are aborted.
    connector = TCPConnector(
        ssl=True if server.tls is None else server.tls, enable_cleanup_closed=NEEDS_CLEANUP_CLOSED, limit=options.pop("limit", 100)
    )
    # Without trust_env: aiohttp knows no CIDR in NO_PROXY, so `server` says which proxy it is.
    return ClientSession(
        connector=connector,
        read_bufsize=READ_BYTES,
        middlewares=middlewares if server.tls_name is None else [name_server, *middlewares],
        **options,
    )


def mend_abort(python: tuple[int, ...]) -> None:
    """Let aborting a TLS connection that is closed already do nothing, as from Python 3.11.4 on (cpython pull request 104485).

    It raises AttributeError from 3.11.1 to 3.11.3, which Debian 12 has; these releases don't change any more.
    """
    if not (3, 11, 1) <= python < (3, 11, 4):
        return
    from asyncio import sslproto

    transport: Any = sslproto._SSLProtocolTransport
    transport.abort = _abort


def _abort(transport: Any) -> None:
    transport._closed = True
    if transport._ssl_protocol is not None:
        transport._ssl_protocol._abort()


async def headers_of(server: Server) -> Any:
    """Headers that say who asks, and as whom: some of them come several times."""
    from multidict import CIMultiDict

    headers: CIMultiDict[str] = CIMultiDict(server.impersonation)
    if (authorization := await server.login.authorization()) is not None:
        headers["Authorization"] = authorization
    return headers


def server_of(connections: Connections, kubeconfig: Kubeconfig | None = None) -> Server:
    """Return the API server of `kubeconfig`, else of the one that leads to the cluster aimed at, else of the pod's service account.

    Raises ConfigError, also for a cluster that is not the one aimed at.
    """
    context, files = connections.context, kubeconfig or connections.kubeconfig()
    server = connections.servers.get((files.paths, context)) or _configured(files, context)
    connections.aim.check(server.url, context)
    connections.servers[files.paths, context] = server
    return server


def _configured(files: Kubeconfig, context: str | None) -> Server:
    try:
        return read_account() if not files.exists and IN_CLUSTER in os.environ else read_server(files.paths, context)
    except ConfigError as error:
        raise _no_cluster(files, error) from None


def _no_cluster(files: Kubeconfig, error: Exception) -> ConfigError:
    """A kubeconfig that isn't there, or that lacks what it should have: its content is the person's to correct."""
    path = files.paths
    if not any(expanded(part).exists() for part in path.split(os.pathsep) if part):
        stated = f"KUBECONFIG names {path}, which is not there" if files.is_stated else f"there is no {path} and KUBECONFIG is not set"
        return ConfigError(
            f"no cluster can be reached: {stated}; set KUBECONFIG to a kubeconfig file (for the embedded cluster: lockstep devcluster up)"
        )
    problem = str(error).removesuffix(".")
    return ConfigError(
        f"no cluster can be reached by {path}: {problem}; set KUBECONFIG to another file, or choose a --context that it has (kubectl config"
        " get-contexts)"
    )
