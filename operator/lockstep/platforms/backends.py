"""The places where jobs run, by their names. A place is added by its line here: a module with a function `backend`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.platforms.backend import Backend
    from lockstep.platforms.clusters.target import Target

KUBERNETES, IN_NAMESPACE, HOSTS, LOCAL = "kubernetes", "in-namespace", "hosts", "local"
MODULES = {
    KUBERNETES: "lockstep.platforms.kubernetes.backend",
    IN_NAMESPACE: "lockstep.platforms.kubernetes.alone",
    HOSTS: "lockstep.platforms.hosts.backend",
    LOCAL: "lockstep.platforms.local.backend",
}
DEFAULT_WORKSPACE = Path(".lockstep/workspace")
"""Workspace of this machine where none is named."""


class Where(Protocol):
    """A place as a command line names it. A backend asks for what it needs."""

    def target(self) -> Target:
        """Return the API server and the namespace that are meant."""

    def of_hosts(self) -> tuple[ClusterFile, str]:
        """Return the cluster file of hosts, and the cluster as it was given."""

    def workspaces(self) -> Sequence[Path]:
        """Return the workspace of this machine that is meant, and those that are looked into beside it."""


def backend_of(name: str, where: Where) -> Backend:
    """Return the backend of this name at a place. Its module is imported only then."""
    backend: Backend = import_module(MODULES[name]).backend(where)
    return backend
