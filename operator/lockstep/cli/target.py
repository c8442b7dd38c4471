"""Which cluster and namespace a verb talks to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lockstep.api.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.api.clusterfile import ClusterFile
    from lockstep.platforms.kubernetes.client import Client

EMBEDDED = "local"


@dataclass(frozen=True)
class Target:
    """A connection, the namespace, and the cluster file that says so."""

    client: Client
    namespace: str
    cluster: ClusterFile


def load(cluster: str) -> ClusterFile:
    """The cluster file of clusters/, or of a path."""
    from lockstep.cli.clusters import load_cluster
    from lockstep.cli.paths import checkout

    is_path = "/" in cluster or cluster.endswith((".yaml", ".yml"))
    return load_cluster(cluster, Path() if is_path else checkout() / "clusters")


def use_embedded_cluster(cluster: str, context: str | None) -> bool:
    """Whether the embedded cluster is meant: `local`, where neither KUBECONFIG nor --context says otherwise.

    Raises:
        ConfigError: it is not up.
    """
    if cluster != EMBEDDED or context is not None or os.environ.get("KUBECONFIG"):
        return bool(os.environ.get("KUBECONFIG")) and _is_embedded(os.environ["KUBECONFIG"])
    from lockstep.devcluster.layout import default_layout

    kubeconfig = default_layout().kubeconfig
    if not kubeconfig.exists():
        raise ConfigError("the embedded cluster is not up: `make cluster-up`, or name another one by --cluster, KUBECONFIG or --context")
    os.environ["KUBECONFIG"] = str(kubeconfig)
    return True


def unnamed_cluster(context: str | None) -> str:
    """Which cluster file counts where none is named: with --context none but the context's own words, else that of the cluster deployed last.

    Where none was deployed from here and the embedded cluster isn't up, ~/.kube/config is asked, as kubectl would.
    """
    from lockstep.cli.deployed import deployed_last
    from lockstep.devcluster.layout import default_layout

    last = deployed_last() if context is None else None
    if last is None and not os.environ.get("KUBECONFIG") and not default_layout().kubeconfig.exists():
        from lockstep.platforms.kubernetes.client import has_kubeconfig, kubeconfig_path

        if has_kubeconfig():
            os.environ["KUBECONFIG"] = kubeconfig_path()
    return last or EMBEDDED


def _is_embedded(kubeconfig: str) -> bool:
    from lockstep.devcluster.layout import default_layout

    return Path(kubeconfig) == default_layout().kubeconfig


def target_of(cluster: str, namespace: str | None, context: str | None) -> Target:
    """The cluster file `cluster` and a connection to the cluster of the kubeconfig."""
    from lockstep.platforms.kubernetes.client import connect

    found = load(cluster)
    chosen = _namespace(found.cluster.name, found.cluster.namespace, namespace, context)
    return Target(connect(context), chosen, found)


def namespace_of(cluster: str, namespace: str | None, context: str | None) -> str:
    """Which namespace is meant, for a verb that connects by itself (`Cluster.connect`)."""
    from lockstep.cli.clusters import peek
    from lockstep.cli.paths import checkout

    stated = peek(cluster, checkout() / "clusters")
    if stated is None:
        section = load(cluster).cluster
        stated = section.name, section.namespace
    return _namespace(*stated, namespace, context)


def _namespace(cluster: str, of_file: str, asked: str | None, context: str | None) -> str:
    """As kubectl's: what is asked, else the context's own. A cluster file that is named says it for its cluster."""
    embedded = use_embedded_cluster(cluster, context)
    if asked or embedded or cluster != EMBEDDED:
        return asked or of_file
    from lockstep.platforms.kubernetes.client import kubeconfig_path
    from lockstep.platforms.kubernetes.kubeconfig import namespace_of_context

    return namespace_of_context(kubeconfig_path(), context) or of_file


def is_same_host(stated: str, server: str) -> bool:
    """Whether the API server's URL is at the host that the cluster file states, with or without its usual `api.` in front."""
    host = urlsplit(server).hostname or ""
    wanted = stated.split(":", maxsplit=1)[0]
    return host in (wanted, f"api.{wanted}")


def current_server(context: str | None) -> str | None:
    """The URL of the API server that commands talk to now: the kubeconfig's, else that of the embedded cluster when it is up."""
    from lockstep.devcluster.layout import default_layout
    from lockstep.platforms.kubernetes.client import connect, has_kubeconfig

    if not has_kubeconfig() and context is None:
        if not default_layout().kubeconfig.exists():
            return None
        os.environ["KUBECONFIG"] = str(default_layout().kubeconfig)
    try:
        return connect(context).server
    except ConfigError:
        if context is not None:
            raise
        return None


def is_talked_to(found: ClusterFile, server: str) -> bool:
    """Whether the server is this cluster's. The embedded cluster has an address of its own and no name in its file."""
    from lockstep.devcluster.layout import default_layout

    if found.cluster.api:
        return is_same_host(found.cluster.api, server)
    return found.cluster.name == EMBEDDED and server == default_layout().server


def refuse_other_cluster(found: ClusterFile, context: str | None, force: bool) -> None:
    """Keep a deployment from landing on the wrong cluster.

    Raises:
        ConfigError: the kubeconfig's server is not at `cluster.api`. Nothing is compared when the file states none.
    """
    from lockstep.platforms.kubernetes.client import connect

    if not found.cluster.api:
        return
    server = connect(context).server
    if not force and not is_same_host(found.cluster.api, server):
        raise ConfigError(
            f"your kubeconfig talks to {server}, but cluster {found.cluster.name} is at {found.cluster.api} (cluster.api in its file): "
            "choose its context with --context, or say --force (make: FORCE=1)"
        )
