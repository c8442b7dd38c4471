"""The same connection for kopf that `Cluster` uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError
from lockstep.platforms.kubernetes.connection import headers_of, server_of, session_to

if TYPE_CHECKING:
    import kopf


async def connection() -> kopf.AiohttpSession:
    """KUBECONFIG or ~/.kube/config, else the pod's service account. The credential is asked for at every login, and kopf logs in again after a 401.

    Raises:
        ConfigError: there is no cluster to talk to, or kopf can't talk to it.
    """
    import kopf

    server = await server_of(None)
    if server.tls_name is not None:
        raise ConfigError(
            "tls-server-name of the kubeconfig's cluster can't be used by the operator: name the server as its certificate does"
        )
    session = session_to(server, headers=await headers_of(server), proxy=server.proxy, limit=0)
    return kopf.AiohttpSession(server=server.url, aiohttp_session=session)
