"""Cluster and namespace that a verb talks to."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lockstep.api.errors import ConfigError
from lockstep.api.names import HOSTS
from lockstep.cli.shared.clusterfiles import OwnFiles, Peeked, cluster_names, find_file, is_path, is_workspace, load_cluster, peek
from lockstep.cli.shared.embedded import reachable_layout
from lockstep.cli.shared.folders import remembered, server_of, was_forced
from lockstep.kube.aim import Connections, Kubeconfig, environment_kubeconfig
from lockstep.plan.cluster.choice import By, Choice
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.output import tell
from lockstep.platforms.places.orders import LACKS, LOCAL, lack

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.cli.shared.places import Verb

EMBEDDED = "local"
NOT_UP = "the embedded cluster is not up: lockstep devcluster up"


class OtherCluster(ConfigError):
    """The kubeconfig's API server is not that of the cluster that a verb was told."""


def load(verb: Verb, cluster: str) -> ClusterFile:
    """Return the cluster file of clusters/, or of a path, and keep connections to its cluster. Raises ConfigError for a workspace of this
    machine.
    """
    refuse_workspace(cluster)
    cluster_file = load_cluster(cluster)
    aim_at_file(verb, cluster_file, cluster)
    return cluster_file


def refuse_workspace(cluster: str) -> None:
    """Raise ConfigError if a workspace of this machine is meant."""
    if is_workspace(cluster):
        raise lack(LOCAL, "cp", name=cluster)


def aim_at_file(verb: Verb, cluster_file: ClusterFile, named: str | None = None) -> None:
    """Keep every connection of the verb to the cluster of this file. Raises ConfigError for one of hosts if the verb is about Kubernetes.

    `named`: the cluster as it was typed: its name, or the path of its file.
    """
    aim_at(verb, cluster_file.cluster.name, cluster_file.cluster.api, is_of_hosts=cluster_file.hosts is not None, named=named)


def aim_at(verb: Verb, name: str, api: str | None, *, checked: bool = True, is_of_hosts: bool = False, named: str | None = None) -> None:
    """Keep every connection of the verb to this cluster, which it was given: the kubeconfig may talk to another.

    `checked` False: the kubeconfig's cluster is taken for it. `is_of_hosts`: it is no Kubernetes cluster, and verbs about Kubernetes are
    refused.
    """
    if is_of_hosts and HOSTS in LACKS.get(verb.words, {}):
        about = f"lockstep {verb.words} is about Kubernetes, and {name} is a cluster of hosts"
        raise ConfigError(f"{about}: {lack(HOSTS, verb.words, name=shlex.quote(named or name))}")
    aim = ClusterAim(name, api, is_named=name != verb.unnamed, is_checked=checked and not verb.forced)
    verb.connections.aim = HostsAim(name) if is_of_hosts else aim


class HostsAim:
    """A cluster of hosts as an aim of connections to Kubernetes (`kube.aim.Aim`): none leads there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kubeconfig(self, context: str | None) -> Kubeconfig:
        """Raise ConfigError: a verb without a part for hosts must not ask the kubeconfig's cluster for a job there."""
        raise ConfigError(f"{self.name} is a cluster of hosts (platform: hosts in its file), and this needs a Kubernetes cluster: name one")

    def check(self, server: str, context: str | None) -> None:
        self.kubeconfig(context)


@dataclass(frozen=True)
class ClusterAim:
    """A cluster file's cluster, as what connections are kept to (`kube.aim.Aim`)."""

    name: str
    api: str | None
    """`cluster.api` of its file."""
    is_named: bool = True
    """Something names it. Else it only stands in for the cluster of the kubeconfig."""
    is_checked: bool = True
    """Another API server than its own is refused."""

    def kubeconfig(self, context: str | None) -> Kubeconfig:
        """Return the embedded cluster's kubeconfig for `local`, unless KUBECONFIG or --context says otherwise. Raises ConfigError: it isn't
        up.
        """
        usual = environment_kubeconfig()
        if self.name != EMBEDDED or context is not None or usual.is_stated:
            return usual
        embedded = embedded_kubeconfig()
        if embedded is not None:
            return embedded
        if not self.is_named and usual.exists:
            return usual  # as kubectl would
        raise ConfigError(f"{NOT_UP}, or name another one by --cluster, KUBECONFIG or --context")

    def check(self, server: str, context: str | None) -> None:
        """Raise OtherCluster if this is another cluster's API server."""
        if not (self.is_named and self.is_checked):
            return
        if self.api:
            if not is_same_host(self.api, server) and not was_forced(self.name, server):
                place = f"your kubeconfig talks to {server}, but cluster {self.name} is at {self.api} (cluster.api in its file)"
                raise self._refusal(place, server, context)
            return
        embedded = reachable_layout() if self.name == EMBEDDED else None
        if embedded is not None and server == embedded.server:
            return
        if embedded is not None and context is None and embedded.kubeconfig.exists():
            place = f"your kubeconfig talks to {server}, but cluster local is the embedded one at {embedded.server} (unset KUBECONFIG)"
            raise self._refusal(place, server, context)
        deployed_to = server_of(self.name)
        if deployed_to is not None and deployed_to != server:
            place = (
                f"your kubeconfig talks to {server}, but cluster {self.name} was deployed to {deployed_to}, and its file states no"
                " cluster.api"
            )
            raise self._refusal(place, server, context)
        other = cluster_at(server, self.name)
        if other is not None:
            place = f"your kubeconfig talks to {server}, but you named cluster {self.name}, whose file states no cluster.api"
            refusal = self._refusal(place, server, context)
            if self.name == EMBEDDED:
                raise refusal
            raise OtherCluster(
                f"{refusal}; if both files describe this one, write `api: {other.api}` below `cluster:` in that of {self.name}"
            )

    def _refusal(self, place: str, server: str, context: str | None) -> OtherCluster:
        other = cluster_at(server, self.name)
        is_in_pod = not self.kubeconfig(context).exists
        who = f"context {context} of your kubeconfig" if context else "this pod's service account" if is_in_pod else "your kubeconfig"
        hint = f", or name the cluster of this one: {other.name}" if other else ""
        return OtherCluster(f"{place.replace('your kubeconfig', who, 1)}: choose its context with --context{hint}")


def cluster_at(server: str, but: str) -> Peeked | None:
    """Return the name and statements of the cluster file, other than that of `but`, that states this API server."""
    for name in cluster_names():
        stated = None if name == but else peek(name)
        if stated is not None and stated.api and is_same_host(stated.api, server):
            return stated._replace(name=name)
    return None


def embedded_kubeconfig() -> Kubeconfig | None:
    """Return the kubeconfig of the embedded cluster; None while that is not up."""
    layout = reachable_layout()
    return Kubeconfig(str(layout.kubeconfig)) if layout is not None and os.path.exists(layout.kubeconfig) else None  # noqa: PTH110 (another user's cache has none)


def is_embedded(verb: Verb, cluster: str) -> bool:
    """Return True if the embedded cluster is meant: `local`, where neither KUBECONFIG nor --context says otherwise.

    Raises:
        ConfigError: it is not up.
    """
    aim, layout = ClusterAim(cluster, None, is_named=cluster != verb.unnamed), reachable_layout()
    files = aim.kubeconfig(verb.connections.context)
    return layout is not None and Path(files.paths) == layout.kubeconfig


def in_use() -> Choice | None:
    """Return the cluster that counts where no option names one, and what names it; None where nothing does. Raises ConfigError for one that
    is gone.
    """
    choice = next(iter(remembered()), None)
    if choice is None or (Path(choice.cluster).exists() if is_path(choice.cluster) else find_file(choice.cluster)):
        return choice
    instead = {By.ENVIRONMENT: "unset it", By.FOLDER: "remove that file"}.get(choice.by, "choose another by lockstep use CLUSTER")
    raise ConfigError(f"there is no {choice.cluster}, which {choice.by} names: name another by --cluster, or {instead}")


CHANGING = frozenset({
    "run", "stop", "resume", "retry", "scale", "delete", "drill", "sync", "cp", "deploy", "cluster clean", "cluster uninstall",
    "cluster rollback", "hosts setup", "preflight", "bench scaling", "cluster calibrate", "model get",
})  # fmt: skip
"""Verbs that change something where they act, and so say where that is."""


def tell_place(verb: Verb, place: str) -> None:
    """Say on standard error, once, where a verb acts that changes something; and what has named the place, if no option did."""
    if verb.words in CHANGING and place != verb.place:
        verb.place = place
        named = f" ({verb.choice.by})" if verb.choice is not None else ""
        tell(f"lockstep: {verb.words} {place}{named}")


def own_target(verb: Verb, cluster_file: ClusterFile, cluster: str) -> Target:
    """Return a connection to a cluster's own API server, whichever context is the current one, and its file's namespace. Raises
    ConfigError: nothing leads there.
    """
    from lockstep.kube.cluster import Client
    from lockstep.kube.kubeconfig import contexts_with_servers

    name, api, files = cluster_file.cluster.name, cluster_file.cluster.api, environment_kubeconfig()
    embedded, own = embedded_kubeconfig() if name == EMBEDDED else None, api or server_of(name)
    if embedded is None and own is None:
        raise ConfigError(NOT_UP if name == EMBEDDED else "its file doesn't say where it is: write `api: HOST` below `cluster:` there")
    contexts = [None] if embedded else [
        context for context, url in contexts_with_servers(files.paths)
        if url == own or (api and (is_same_host(api, url) or was_forced(name, url)))
    ]  # fmt: skip
    if not contexts:
        raise ConfigError(f"no context of {files.paths} leads to its API server {own}: log in there, or name another file by KUBECONFIG")
    client = Client(Connections(contexts[0], ClusterAim(name, api), verb.connections.servers), embedded or files)
    return Target(client, cluster_file.cluster.namespace, cluster, f" --cluster {shlex.quote(cluster)}", files=OwnFiles())


def is_same_host(stated: str, server: str) -> bool:
    """Return True if the API server's URL is at the host that the cluster file states, with or without its usual `api.` in front.

    A port counts where the file states one: two clusters of one machine differ in nothing else.
    """
    url, expected = urlsplit(server), urlsplit(stated if "://" in stated else f"//{stated}")
    host, name = ((part.hostname or "").rstrip(".") for part in (url, expected))
    try:
        same_port = expected.port is None or expected.port == (url.port or {"https": 443, "http": 80}.get(url.scheme))
    except ValueError:  # no port has such a number
        return False
    return bool(name) and host in (name, f"api.{name}") and same_port


def current_server(connections: Connections) -> str | None:
    """Return the URL of the API server that commands talk to now: the kubeconfig's, else that of the embedded cluster when it is up."""
    from lockstep.kube.cluster import Client

    files = environment_kubeconfig()
    if not files.exists and connections.context is None:
        embedded = embedded_kubeconfig()
        if embedded is None:
            return None
        files = embedded
    try:
        return Client(connections, files).server
    except ConfigError:
        if connections.context is not None:
            raise
        return None


def is_talked_to(cluster_file: ClusterFile, server: str) -> bool:
    """Return True if the server is this cluster's. The embedded cluster has an address of its own and no name in its file."""
    if cluster_file.cluster.api:
        return is_same_host(cluster_file.cluster.api, server)
    layout = reachable_layout() if cluster_file.cluster.name == EMBEDDED else None
    return layout is not None and server == layout.server


def refuse_other_cluster(verb: Verb, cluster_file: ClusterFile, force: bool | None = None) -> None:
    """Keep a deployment from landing on the wrong cluster. `force` says that the server is this one's; None: the verb has no such option.

    Raises:
        OtherCluster: the kubeconfig's server is another cluster's.
    """
    from lockstep.kube.cluster import Client

    name, api = cluster_file.cluster.name, cluster_file.cluster.api
    tell_place(verb, f"on cluster {name}, namespace {cluster_file.cluster.namespace}")
    if force:
        verb.forced = True
        return aim_at(verb, name, api)
    aim = ClusterAim(name, api, is_named=name != verb.unnamed)
    try:
        aim.check(Client(verb.connections).server, verb.connections.context)
    except OtherCluster as error:
        raise OtherCluster(f"{error}{'' if force is None else ', or use --force'}") from None
