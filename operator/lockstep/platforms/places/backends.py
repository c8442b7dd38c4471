"""The places where jobs run, by their names, and what only some of them can do. A place is added by its line here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError
from lockstep.api.names import HOSTS, KUBERNETES
from lockstep_spec.words import listed

if TYPE_CHECKING:
    from lockstep.platforms.places.backend import Backend, NamedPlace

IN_NAMESPACE, LOCAL = "in-namespace", "local"
BACKENDS = {
    KUBERNETES: "lockstep.platforms.kubernetes.backend.KubernetesBackend",
    IN_NAMESPACE: "lockstep.platforms.kubernetes.innamespace.InNamespace",
    HOSTS: "lockstep.platforms.hosts.backend.HostsBackend",
    LOCAL: "lockstep.platforms.local.backend.LocalBackend",
}
"""Name → class of each place."""
DEFAULT_WORKSPACE = Path(".lockstep/workspace")
"""Workspace of this machine where none is named."""


def backend_class(name: str) -> type[Backend]:
    """Return the class of this name. Its module is imported only then."""
    module, _, title = BACKENDS[name].rpartition(".")
    backend: type[Backend] = getattr(import_module(module), title)
    return backend


def backend_of(name: str, where: NamedPlace) -> Backend:
    """Return the backend of this name at a place."""
    return backend_class(name).at(where)


TAKEN_BY = {
    "--detach": (KUBERNETES, HOSTS),
    "--hosts": (HOSTS,),
    "--first": (HOSTS,),
    "--without": (HOSTS,),
    "--anyway": (HOSTS,),
    "--preview": (LOCAL,),
}
"""Option → places that take it."""
PLACES = {KUBERNETES: "on a cluster", HOSTS: "on hosts", LOCAL: "on this machine", IN_NAMESPACE: "without the operator"}
INSTEAD = {
    KUBERNETES: "name the cluster file of hosts with --cluster, or add --local",
    HOSTS: "leave it out",
    LOCAL: "leave out --local, and name a cluster with --cluster",
    IN_NAMESPACE: "leave out --in-namespace",
}


def refuse(place: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError for options that are stated and mean nothing in this place, with the places where they do."""
    wrong = [name for name, value in options.items() if value and place not in TAKEN_BY[name]]
    if wrong:
        taken = [words for name, words in PLACES.items() if all(name in TAKEN_BY[option] for option in wrong)]
        where = f" {' or '.join(taken)}" if taken else ""
        raise ConfigError(
            f"{listed(wrong)} {'is' if len(wrong) == 1 else 'are'} for a job{where}, and this one runs {PLACES[place]}: {INSTEAD[place]}"
        )
