"""HTTP and websockets to one API server, as whom the kubeconfig or the pod's service account says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.plan.proxy import proxy_of
from lockstep.platforms.kubernetes import kubeconfig
from lockstep.platforms.kubernetes.client import IN_CLUSTER, has_kubeconfig, kubeconfig_path, no_cluster
from lockstep.platforms.kubernetes.kubeconfig import Server

READ_BYTES = 1 << 21
"""A watch's event is one line, and may be as large as an object."""


class Connection:
    """A session that is opened with the first request, in the event loop that this is made in."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._session: Any = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> Any:
        if self._session is None:
            from aiohttp import ClientSession, TCPConnector
            from aiohttp.connector import NEEDS_CLEANUP_CLOSED

            # Python before 3.12.8 leaves the socket open when TLS over it ended in disorder: at the end of such a session they are aborted.
            tls = True if self.server.tls is None else self.server.tls
            connector = TCPConnector(ssl=tls, enable_cleanup_closed=NEEDS_CLEANUP_CLOSED)
            # Without trust_env: aiohttp knows no CIDR in NO_PROXY, so `server` says which proxy it is.
            self._session = ClientSession(connector=connector, read_bufsize=READ_BYTES)
        return self._session

    async def _asked_as(self) -> dict[str, Any]:
        header = await self.server.authorization()
        asked: dict[str, Any] = {"headers": {} if header is None else {"Authorization": header}, "proxy": self.server.proxy}
        if self.server.tls_name is not None:
            asked["server_hostname"] = self.server.tls_name
        return asked

    async def request(self, method: str, path: str, body: str | BytesIO | None, headers: dict[str, str], seconds: float) -> Any:
        """aiohttp's response, whatever its status."""
        from aiohttp import ClientTimeout

        asked = await self._asked_as()
        asked["headers"] |= headers
        return await self._opened().request(method, self.server.url + path, data=body, timeout=ClientTimeout(total=seconds), **asked)

    async def websocket(self, path: str, protocols: Sequence[str], heartbeat: float | None) -> Any:
        """aiohttp's websocket. Its messages are as large as the server makes them."""
        asked = await self._asked_as()
        return await self._opened().ws_connect(self.server.url + path, protocols=protocols, heartbeat=heartbeat, max_msg_size=0, **asked)


async def server_of(context: str | None) -> Server:
    """By KUBECONFIG and --context, else as the pod's service account. Raises ConfigError."""
    if has_kubeconfig() or IN_CLUSTER not in os.environ:
        try:
            found = kubeconfig.read(kubeconfig_path(), context)
        except ConfigError as error:
            raise no_cluster(error) from None
        if found is not None:
            return found
    return await _by_the_library(context)


async def _by_the_library(context: str | None) -> Server:
    """A service account, whose token's file is read again now and then, and logins that only the library knows.

    From a pod the API server is near: a proxy that its environment names is for what lies outside of the cluster.
    """
    import ssl

    from kubernetes.aio import client, config

    configuration = client.Configuration()
    namespace = proxy = None
    try:
        if has_kubeconfig() or IN_CLUSTER not in os.environ:
            loader = await config.load_kube_config(kubeconfig_path(), context=context, client_configuration=configuration)
            namespace = loader.current_context.get("context", {}).get("namespace")
            proxy = configuration.proxy or proxy_of(configuration.host, os.environ)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        raise no_cluster(error) from None

    async def authorization() -> str | None:
        return (await configuration.auth_settings()).get("BearerToken", {}).get("value") or None

    tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        tls.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return Server(configuration.host, namespace, tls, authorization, configuration.tls_server_name, proxy)
