"""Which cluster and namespace a verb talks to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lockstep.api.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.kube.client import Client

EMBEDDED = "local"


class OtherCluster(ConfigError):
    """The kubeconfig's API server is not that of the cluster that a verb was told."""


@dataclass(frozen=True)
class Target:
    """A connection, and the namespace of the cluster file."""

    client: Client
    namespace: str
    cluster: str
    """As it was named: a cluster of clusters/, or the path of a file."""


def load(cluster: str) -> ClusterFile:
    """The cluster file of clusters/, or of a path."""
    from lockstep.cli.shared.clusters import load_cluster
    from lockstep.cli.shared.paths import checkout

    is_path = "/" in cluster or cluster.endswith((".yaml", ".yml"))
    found = load_cluster(cluster, Path() if is_path else checkout() / "clusters")
    aim_at(found.cluster.name, found.cluster.api)
    return found


class Verb:
    """The verb that runs now, for as long as it does."""

    runs = False
    unnamed: str | None = None
    """The cluster that stands in where none was named and none was deployed from here; its name promises nothing."""
    forced = False
    """The person has said that the kubeconfig's cluster is the one that is meant."""
    aimed = False
    """Its connections are kept to one cluster."""


@contextmanager
def one_verb() -> Iterator[None]:
    """Forget, at the end of a verb, which cluster its connections were for: a process may run several."""
    from lockstep.kube.client import Connections

    Verb.runs, Connections.servers = True, {}
    try:
        yield
    finally:
        Connections.servers = None
        _take_anywhere()
        Verb.runs, Verb.unnamed, Verb.forced = False, None, False


def aim_at(name: str, api: str | None) -> None:
    """Keep every connection of the verb that runs to this cluster: what it is told counts, whatever the kubeconfig talks to."""
    if Verb.runs and not Verb.forced:
        from lockstep.kube.client import Connections

        Connections.aim, Verb.aimed = ClusterAim(name, api, promised=name != Verb.unnamed), True


def _take_anywhere() -> None:
    if Verb.aimed:  # else the client needn't be imported
        from lockstep.kube.client import ANYWHERE, Connections

        Connections.aim, Verb.aimed = ANYWHERE, False


@dataclass(frozen=True)
class ClusterAim:
    """A cluster file's cluster, as what connections are kept to (`client.Aim`)."""

    name: str
    api: str | None
    """`cluster.api` of its file."""
    promised: bool = True
    """Somebody named it, or it was deployed last from this checkout. Else it only stands in for the cluster of the kubeconfig."""

    def choose(self, context: str | None) -> None:
        use_embedded_cluster(self.name, context)

    def check(self, server: str, context: str | None) -> None:
        """Raises OtherCluster."""
        from lockstep.cli.shared.deployment import server_of, was_forced
        from lockstep.devcluster.host.layout import default_layout

        if not self.promised:
            return
        if self.api:
            if not is_same_host(self.api, server) and not was_forced(self.name, server):
                place = f"your kubeconfig talks to {server}, but cluster {self.name} is at {self.api} (cluster.api in its file)"
                raise OtherCluster(_refusal(place, self.name, server, context))
            return
        embedded = default_layout()
        if self.name == EMBEDDED and server == embedded.server:
            return
        if self.name == EMBEDDED and context is None and embedded.kubeconfig.exists():
            place = f"your kubeconfig talks to {server}, but cluster local is the embedded one at {embedded.server} (unset KUBECONFIG)"
            raise OtherCluster(_refusal(place, self.name, server, context))
        known = server_of(self.name)
        if known is not None and known != server:
            place = f"your kubeconfig talks to {server}, but cluster {self.name} was deployed to {known} from this checkout, and its file states no cluster.api"
            raise OtherCluster(_refusal(place, self.name, server, context))
        if cluster_at(server, self.name):
            place = f"your kubeconfig talks to {server}, but you named cluster {self.name}"
            raise OtherCluster(_refusal(place, self.name, server, context))


def _refusal(place: str, name: str, server: str, context: str | None) -> str:
    from lockstep.kube.client import has_kubeconfig

    other = cluster_at(server, name)
    who = f"context {context} of your kubeconfig" if context else "your kubeconfig" if has_kubeconfig() else "this pod's service account"
    hint = f", or name the cluster of this one: {other}" if other else ""
    return f"{place.replace('your kubeconfig', who, 1)}: choose its context with --context{hint}"


def cluster_at(server: str, but: str) -> str | None:
    """The cluster of clusters/, other than `but`, whose file states this API server."""
    from lockstep.cli.shared.clusters import cluster_names, peek
    from lockstep.cli.shared.paths import checkout

    try:
        folder = checkout() / "clusters"
    except ConfigError:
        return None
    for name in cluster_names(folder):
        stated = None if name == but else peek(name, folder)
        if stated is not None and stated[2] and is_same_host(stated[2], server):
            return name
    return None


def use_embedded_cluster(cluster: str, context: str | None) -> bool:
    """Whether the embedded cluster is meant: `local`, where neither KUBECONFIG nor --context says otherwise.

    Raises:
        ConfigError: it is not up.
    """
    if cluster != EMBEDDED or context is not None or os.environ.get("KUBECONFIG"):
        return bool(os.environ.get("KUBECONFIG")) and _is_embedded(os.environ["KUBECONFIG"])
    from lockstep.devcluster.host.layout import default_layout

    kubeconfig = default_layout().kubeconfig
    if not kubeconfig.exists():
        raise ConfigError("the embedded cluster is not up: `make cluster-up`, or name another one by --cluster, KUBECONFIG or --context")
    os.environ["KUBECONFIG"] = str(kubeconfig)
    return True


def unnamed_cluster(context: str | None) -> str:
    """Which cluster file counts where none is named: with --context none but the context's own words, else that of the cluster deployed last.

    Where none was deployed from here and the embedded cluster isn't up, ~/.kube/config is asked, as kubectl would.
    """
    from lockstep.cli.shared.deployment import deployed_last
    from lockstep.devcluster.host.layout import default_layout

    last = deployed_last() if context is None else None
    Verb.unnamed = EMBEDDED if last is None else None
    if last is None and not os.environ.get("KUBECONFIG") and not default_layout().kubeconfig.exists():
        from lockstep.kube.client import has_kubeconfig, kubeconfig_path

        if has_kubeconfig():
            os.environ["KUBECONFIG"] = kubeconfig_path()
    return last or EMBEDDED


def _is_embedded(kubeconfig: str) -> bool:
    from lockstep.devcluster.host.layout import default_layout

    return Path(kubeconfig) == default_layout().kubeconfig


def target_of(cluster: str, namespace: str | None, context: str | None) -> Target:
    """A connection to the cluster of the kubeconfig, and the namespace that is meant there."""
    from lockstep.kube.client import connect

    chosen = namespace_of(cluster, namespace, context)
    return Target(connect(context), chosen, cluster)


def namespace_of(cluster: str, namespace: str | None, context: str | None) -> str:
    """Which namespace is meant on a cluster. Its models are imported only where its file needs explaining."""
    from lockstep.cli.shared.clusters import peek
    from lockstep.cli.shared.paths import checkout

    stated = peek(cluster, checkout() / "clusters")
    if stated is None:
        section = load(cluster).cluster
        stated = section.name, section.namespace, section.api
    name, stated_namespace, api = stated
    aim_at(name, api)
    return _namespace(name, stated_namespace, namespace, context)


def _namespace(cluster: str, of_file: str, asked: str | None, context: str | None) -> str:
    """As kubectl's: what is asked, else the context's own. A cluster file that is named says it for its cluster."""
    embedded = use_embedded_cluster(cluster, context)
    if asked or embedded or cluster != EMBEDDED:
        return asked or of_file
    from lockstep.kube.client import kubeconfig_path
    from lockstep.kube.kubeconfig import namespace_of_context

    return namespace_of_context(kubeconfig_path(), context) or of_file


def is_same_host(stated: str, server: str) -> bool:
    """Whether the API server's URL is at the host that the cluster file states, with or without its usual `api.` in front.

    A port counts where the file states one: two clusters of one machine differ in nothing else.
    """
    url, wanted = urlsplit(server), urlsplit(stated if "://" in stated else f"//{stated}")
    host, name = ((part.hostname or "").rstrip(".") for part in (url, wanted))
    try:
        same_port = wanted.port is None or wanted.port == (url.port or {"https": 443, "http": 80}.get(url.scheme))
    except ValueError:  # no port has such a number
        return False
    return bool(name) and host in (name, f"api.{name}") and same_port


def current_server(context: str | None) -> str | None:
    """The URL of the API server that commands talk to now: the kubeconfig's, else that of the embedded cluster when it is up."""
    from lockstep.devcluster.host.layout import default_layout
    from lockstep.kube.client import connect, has_kubeconfig

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
    from lockstep.devcluster.host.layout import default_layout

    if found.cluster.api:
        return is_same_host(found.cluster.api, server)
    return found.cluster.name == EMBEDDED and server == default_layout().server


def refuse_other_cluster(found: ClusterFile, context: str | None, force: bool) -> None:
    """Keep a deployment from landing on the wrong cluster.

    Raises:
        OtherCluster: the kubeconfig's server is another cluster's, unless `force` says that it is this one's.
    """
    from lockstep.kube.client import connect

    if force:
        Verb.forced = Verb.runs
        return _take_anywhere()
    aim = ClusterAim(found.cluster.name, found.cluster.api, promised=found.cluster.name != Verb.unnamed)
    try:
        aim.check(connect(context).server, context)
    except OtherCluster as error:
        raise OtherCluster(f"{error}, or say --force (make: FORCE=1)") from None
