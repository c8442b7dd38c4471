"""Which cluster and namespace a verb talks to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.api.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.api.clusterfile import ClusterFile

EMBEDDED = "local"


@dataclass(frozen=True)
class Target:
    """A connection, the namespace, and the cluster file that says so."""

    client: Any
    namespace: str
    cluster: ClusterFile


def use_embedded_cluster(cluster: str, context: str | None) -> None:
    """For the cluster `local`: where neither KUBECONFIG nor --context says otherwise, the embedded cluster is meant.

    Raises:
        ConfigError: it is not up.
    """
    if cluster != EMBEDDED or context is not None or "KUBECONFIG" in os.environ:
        return
    from lockstep.devcluster.layout import default_layout

    kubeconfig = default_layout().kubeconfig
    if not kubeconfig.exists():
        raise ConfigError("the embedded cluster is not up: `make cluster-up`, or name another one by KUBECONFIG or --context")
    os.environ["KUBECONFIG"] = str(kubeconfig)


def target_of(cluster: str, namespace: str | None, context: str | None) -> Target:
    """The cluster file `cluster` and a connection to the cluster of the kubeconfig."""
    from lockstep.cli.clusters import load_cluster
    from lockstep.cli.paths import checkout
    from lockstep.platforms.kubernetes.client import connect

    found = load_cluster(cluster, checkout() / "clusters")
    use_embedded_cluster(found.cluster.name, context)
    return Target(connect(context), namespace or found.cluster.namespace, found)
