"""Cluster and namespace that a verb talks to."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lockstep.api.errors import ConfigError
from lockstep.api.names import HOSTS
from lockstep.cli.shared.clusterfiles import Peeked, cluster_names, find_file, is_path, is_workspace, load_cluster, peek
from lockstep.cli.shared.embedded import reachable_layout
from lockstep.cli.shared.folders import remembered, server_of, was_forced
from lockstep.cli.shared.onhosts import HostsAim, Typed, refuse_on_hosts
from lockstep.kube.aim import ANYWHERE, Connections, Kubeconfig, environment_kubeconfig
from lockstep.platforms.output import tell

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.kube.cluster import Client
    from lockstep.plan.cluster.choice import Choice

EMBEDDED = "local"
NOT_UP = "the embedded cluster is not up: lockstep devcluster up"


class OtherCluster(ConfigError):
    """The kubeconfig's API server is not that of the cluster that a verb was told."""


@dataclass(frozen=True)
class Target:
    """A connection, and the namespace of the cluster file."""

    client: Client
    namespace: str
    cluster: str
    """Name that was given: a cluster of clusters/, or the path of a file."""
    options: str = ""
    """Options that lead to the same API server again, with a space in front; "" where verbs ask it by themselves."""


def load(cluster: str) -> ClusterFile:
    """Return the cluster file of clusters/, or of a path, and keep connections to its cluster. Raises ConfigError for a workspace of this
    machine.
    """
    refuse_workspace(cluster)
    cluster_file = load_cluster(cluster)
    aim_at_file(cluster_file, cluster)
    return cluster_file


def refuse_workspace(cluster: str) -> None:
    """Raise ConfigError if a workspace of this machine is meant."""
    if is_workspace(cluster):
        raise ConfigError(f"{cluster} is a workspace of this machine, and this is about a cluster: name one by --cluster")


def aim_at_file(cluster_file: ClusterFile, named: str | None = None) -> None:
    """Keep every connection of the running verb to the cluster of this file. Raises ConfigError for one of hosts if the verb is about
    Kubernetes.

    `named`: the cluster as it was typed: its name, or the path of its file.
    """
    aim_at(cluster_file.cluster.name, cluster_file.cluster.api, is_of_hosts=cluster_file.hosts is not None, named=named)


class Verb:
    """Options of the verb that runs, besides what `Connections` holds."""

    unnamed: str | None = None
    """The cluster that stands in where nothing names one; its name promises nothing."""
    forced = False
    """The person has said that the kubeconfig's cluster is the one that is meant."""
    choice: Choice | None = None
    """The cluster that counts because no option names one."""
    place = ""
    """Place that was said, where the verb changes something."""
    told = ""
    """The cluster that counts though nothing names it, once the person has read so."""


@contextmanager
def one_verb() -> Iterator[None]:
    """Forget, at the end of a verb, which cluster its connections were for: a process may run several."""
    Connections.servers = {}
    try:
        yield
    finally:
        Connections.servers, Connections.aim = None, ANYWHERE
        Verb.unnamed, Verb.forced, Verb.choice, Verb.place, Verb.told, Typed.verb = None, False, None, "", "", ""


def aim_at(name: str, api: str | None, *, checked: bool = True, is_of_hosts: bool = False, named: str | None = None) -> None:
    """Keep every connection of the running verb to this cluster, which the verb was given: the kubeconfig may talk to another.

    `checked` False: the kubeconfig's cluster is taken for it. `is_of_hosts`: it is no Kubernetes cluster, and verbs about Kubernetes are
    refused.
    """
    if is_of_hosts:
        refuse_on_hosts(name, named or name)
    if Connections.servers is not None:
        aim = ClusterAim(name, api, is_named=name != Verb.unnamed, is_checked=checked and not Verb.forced)
        Connections.aim = HostsAim(name) if is_of_hosts else aim


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


def is_embedded(cluster: str, context: str | None) -> bool:
    """Return True if the embedded cluster is meant: `local`, where neither KUBECONFIG nor --context says otherwise.

    Raises:
        ConfigError: it is not up.
    """
    files, layout = ClusterAim(cluster, None, is_named=cluster != Verb.unnamed).kubeconfig(context), reachable_layout()
    return layout is not None and Path(files.paths) == layout.kubeconfig


def unnamed_cluster(context: str | None) -> str:
    """Return the cluster whose file counts where no option names one: with --context none but the context's own words, else the one that
    `remembered` has first.

    Where nothing names one and the embedded cluster isn't up, ~/.kube/config is asked, as kubectl would.

    Raises ConfigError for one that is gone.
    """
    Verb.choice = choice = in_use() if context is None else None
    Verb.unnamed = EMBEDDED if choice is None else None
    return EMBEDDED if choice is None else choice.cluster


def in_use() -> Choice | None:
    """Return the cluster that counts where no option names one, and what names it; None where nothing does. Raises ConfigError for one that
    is gone.
    """
    from lockstep.plan.cluster.choice import By

    choice = next(iter(remembered()), None)
    if choice is None or (Path(choice.cluster).exists() if is_path(choice.cluster) else find_file(choice.cluster)):
        return choice
    instead = {By.ENVIRONMENT: "unset it", By.FOLDER: "remove that file"}.get(choice.by, "choose another by lockstep use CLUSTER")
    raise ConfigError(f"there is no {choice.cluster}, which {choice.by} names: name another by --cluster, or {instead}")


def as_found(cluster_file: ClusterFile) -> str:
    """Return the cluster of this file as verbs find it again: as it is remembered where that is why it counts, else by its name."""
    return cluster_file.cluster.name if Verb.choice is None else Verb.choice.cluster


CHANGING = frozenset({
    "run", "stop", "resume", "retry", "scale", "delete", "drill", "sync", "cp", "deploy", "cluster clean", "cluster uninstall",
    "cluster rollback", "hosts setup", "preflight", "bench scaling", "cluster calibrate", "model get",
})  # fmt: skip
"""Verbs that change something where they act, and so say where that is."""


def tell_place(place: str) -> None:
    """Say on standard error, once, where a verb acts that changes something; and what has named the place, if no option did."""
    if Typed.verb in CHANGING and place != Verb.place:
        Verb.place = place
        named = f" ({Verb.choice.by})" if Verb.choice is not None else ""
        tell(f"lockstep: {Typed.verb} {place}{named}")


def tell_cluster(name: str, namespace: str, context: str | None) -> None:
    """Say so of a namespace of a Kubernetes cluster, whose API server stands in for a name where nothing names it."""
    from lockstep.kube.cluster import Client

    is_nameless = name == Verb.unnamed and not is_embedded(name, context)
    tell_place(f"on {f'the cluster at {Client(context).server}' if is_nameless else f'cluster {name}'}, namespace {namespace}")


def target_of(cluster: str, namespace: str | None, context: str | None) -> Target:
    """Return a connection to the cluster of the kubeconfig, and the namespace that is meant there."""
    from lockstep.kube.cluster import Client

    chosen = namespace_of(cluster, namespace, context)
    return Target(Client(context), chosen, cluster, options_to(cluster, context))


def own_target(cluster_file: ClusterFile, cluster: str) -> Target:
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
    client = Client(contexts[0], embedded or files, ClusterAim(name, api))
    return Target(client, cluster_file.cluster.namespace, cluster, f" --cluster {shlex.quote(cluster)}")


def options_to(cluster: str, context: str | None) -> str:
    """Return the options of `Target.options` for a cluster, as it was given."""
    usual = next(iter(remembered()), None)
    is_usual = Verb.unnamed is not None or cluster == (EMBEDDED if usual is None else usual.cluster)
    words = [*(() if is_usual else ("--cluster", cluster)), *(("--context", context) if context else ())]
    return "".join(f" {shlex.quote(word)}" for word in words)


def hosts_of(cluster: str) -> ClusterFile | None:
    """Return the cluster file of hosts that is meant; None for a Kubernetes cluster. Raises ConfigError for one that can't be read.

    `local` is no hosts' unless an option names it: whichever folder one stands in may have a file of that name.
    """
    stated = peek(cluster)
    is_typed = Verb.unnamed is None and (Verb.choice is None or Verb.choice.is_typed)
    if (stated is not None and not stated.is_of_hosts) or (cluster == EMBEDDED and not is_typed):
        return None
    cluster_file = load(cluster)
    return cluster_file if cluster_file.hosts is not None else None


def namespace_of(cluster: str, namespace: str | None, context: str | None) -> str:
    """Return the namespace that is meant on a cluster. The models are imported only where its file needs explaining."""
    refuse_workspace(cluster)
    stated = peek(cluster)
    if stated is None:
        file = load(cluster)
        stated = Peeked(file.cluster.name, file.cluster.namespace, file.cluster.api, file.hosts is not None)
    aim_at(stated.name, stated.api, is_of_hosts=stated.is_of_hosts, named=cluster)
    if stated.is_of_hosts:
        return HOSTS
    chosen = _namespace(stated.name, stated.namespace, namespace, context)
    tell_cluster(stated.name, chosen, context)
    return chosen


def _namespace(cluster: str, of_file: str, namespace: str | None, context: str | None) -> str:
    """Return the namespace as kubectl chooses it: the one asked for, else the context's own. A named cluster's file says it for its
    cluster.
    """
    embedded = is_embedded(cluster, context)
    if namespace or embedded or cluster != EMBEDDED:
        return namespace or of_file
    from lockstep.kube.kubeconfig import chosen_context

    return chosen_context(environment_kubeconfig().paths, context)[1] or of_file


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


def current_server(context: str | None) -> str | None:
    """Return the URL of the API server that commands talk to now: the kubeconfig's, else that of the embedded cluster when it is up."""
    from lockstep.kube.cluster import Client

    files = environment_kubeconfig()
    if not files.exists and context is None:
        embedded = embedded_kubeconfig()
        if embedded is None:
            return None
        files = embedded
    try:
        return Client(context, files).server
    except ConfigError:
        if context is not None:
            raise
        return None


def is_talked_to(cluster_file: ClusterFile, server: str) -> bool:
    """Return True if the server is this cluster's. The embedded cluster has an address of its own and no name in its file."""
    if cluster_file.cluster.api:
        return is_same_host(cluster_file.cluster.api, server)
    layout = reachable_layout() if cluster_file.cluster.name == EMBEDDED else None
    return layout is not None and server == layout.server


def refuse_other_cluster(cluster_file: ClusterFile, context: str | None, force: bool) -> None:
    """Keep a deployment from landing on the wrong cluster.

    Raises:
        OtherCluster: the kubeconfig's server is another cluster's, unless `force` says that it is this one's.
    """
    from lockstep.kube.cluster import Client

    name, api = cluster_file.cluster.name, cluster_file.cluster.api
    tell_place(f"on cluster {name}, namespace {cluster_file.cluster.namespace}")
    if force:
        Verb.forced = Connections.servers is not None
        return aim_at(name, api)
    aim = ClusterAim(name, api, is_named=name != Verb.unnamed)
    try:
        aim.check(Client(context).server, context)
    except OtherCluster as error:
        raise OtherCluster(f"{error}, or use --force") from None
