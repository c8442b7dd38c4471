"""Which cluster is talked to, and as whom: KUBECONFIG or ~/.kube/config (--context chooses in it), else the pod's service account."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lockstep.api.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.kube.cluster import Cluster
    from lockstep.kube.kubeconfig import Server

T = TypeVar("T")
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"


class Aim(Protocol):
    """Which cluster connections are for."""

    def choose(self, context: str | None) -> None:
        """Called before the kubeconfig is read."""

    def check(self, server: str, context: str | None) -> None:
        """Called with the API server's URL before anything is sent to it. Raises ConfigError when it is another cluster's."""


class _Anywhere:
    """Whichever cluster the kubeconfig names."""

    def choose(self, context: str | None) -> None: ...

    def check(self, server: str, context: str | None) -> None: ...


ANYWHERE = _Anywhere()


class Connections:
    """What holds for every connection that this process opens."""

    aim: Aim = ANYWHERE
    servers: dict[tuple[str, str | None], Server] | None = None
    """While a verb runs: what kubeconfigs, by their paths and a context, have said. A program that logs in is run once, then."""


def has_kubeconfig() -> bool:
    return bool(os.environ.get("KUBECONFIG")) or (Path.home() / ".kube" / "config").exists()


def kubeconfig_path() -> str:
    """Read now: the libraries read $KUBECONFIG only once, when they are imported."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def connect(context: str | None = None) -> Client:
    """For the command line. Raises ConfigError when there is no cluster to talk to."""
    return Client(context)


class Client:
    """What blocking verbs talk through: one request by itself, or one asynchronous piece of work, each on a connection of its own."""

    def __init__(self, context: str | None = None) -> None:
        from lockstep.kube.connection import server_of

        self._server = _run(lambda: server_of(context))

    def run(self, work: Callable[[Cluster], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, done on a connection that ends with it."""
        from lockstep.kube.cluster import Cluster
        from lockstep.kube.connection import Connection

        async def done() -> T:
            async with Cluster(Connection(self._server)) as cluster:
                return await work(cluster)

        return _run(done)

    def request(
        self,
        method: str,
        path: str,
        body: object | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """One request by itself. Raises as `Cluster.request` does."""
        return self.run(lambda cluster: cluster.request(method, path, body, query, content_type))

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self._server.url


def _run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """asyncio.run, for verbs that are in an event loop themselves, too: on a thread of its own then."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(make())).result()


def no_cluster(error: Exception) -> ConfigError:
    """A kubeconfig that isn't there, or that lacks what it should have: what stands in it is the person's to correct."""
    path = kubeconfig_path()
    if not any(Path(part).expanduser().exists() for part in path.split(os.pathsep) if part):
        stated = (
            f"KUBECONFIG names {path}, which is not there"
            if os.environ.get("KUBECONFIG")
            else f"there is no {path} and KUBECONFIG is not set"
        )
        return ConfigError(
            f"no cluster can be reached: {stated}; set KUBECONFIG to a kubeconfig file (for the embedded cluster: make cluster-up)"
        )
    said = str(error).removesuffix(".")
    return ConfigError(
        f"no cluster can be reached by {path}: {said}; set KUBECONFIG to another file, or say a --context that it has (kubectl config get-contexts)"
    )
