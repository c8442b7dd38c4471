"""The places where jobs run, by their names. A place is added by its line here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.api.names import HOSTS, KUBERNETES
from lockstep.platforms.places.orders import IN_NAMESPACE, LOCAL

if TYPE_CHECKING:
    from lockstep.platforms.places.backend import Backend, NamedPlace

BACKENDS = {
    KUBERNETES: "lockstep.platforms.kubernetes.backend.KubernetesBackend",
    IN_NAMESPACE: "lockstep.platforms.kubernetes.innamespace.InNamespace",
    HOSTS: "lockstep.platforms.hosts.backend.HostsBackend",
    LOCAL: "lockstep.platforms.local.backend.LocalBackend",
}
"""Name → class of each place."""
DEFAULT_WORKSPACE = Path(".lockstep/workspace")
"""Workspace of this machine where none is named."""


def words_to(workspace: Path) -> dict[str, object]:
    """Return the option that names a workspace of this machine on a command line, and its value."""
    if workspace == DEFAULT_WORKSPACE:
        return {"--local": True}
    return {"--cluster": str(workspace) if "/" in str(workspace) else f"./{workspace}"}


def backend_class(name: str) -> type[Backend]:
    """Return the class of this name. Its module is imported only then."""
    module, _, title = BACKENDS[name].rpartition(".")
    backend: type[Backend] = getattr(import_module(module), title)
    return backend


def backend_of(name: str, where: NamedPlace) -> Backend:
    """Return the backend of this name at a place."""
    return backend_class(name).at(where)
