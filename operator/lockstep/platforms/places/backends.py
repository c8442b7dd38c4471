"""The places where jobs run, by their names, and what is said of a job ahead of its start. A place is added by its line here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol

from lockstep.api.names import HOSTS, KUBERNETES
from lockstep.platforms.places.orders import IN_NAMESPACE, LOCAL

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.plan.ahead.forecast import Forecast
    from lockstep.plan.cluster.finding import Finding
    from lockstep.plan.render.resolved import Resolved
    from lockstep.plan.translate.trainer import Size
    from lockstep.platforms.places.backend import Backend
    from lockstep.platforms.places.orders import Order, PlanWishes
    from lockstep.platforms.places.values import NamedPlace

BACKENDS = {
    KUBERNETES: "lockstep.platforms.kubernetes.backend:KubernetesBackend",
    IN_NAMESPACE: "lockstep.platforms.kubernetes.innamespace:InNamespace",
    HOSTS: "lockstep.platforms.hosts.backend:HostsBackend",
    LOCAL: "lockstep.platforms.local.backend:LocalBackend",
}
"""Name → class of each place."""
AHEAD = {
    KUBERNETES: "lockstep.platforms.kubernetes.ahead:KubernetesAhead",
    HOSTS: "lockstep.platforms.hosts.ahead:HostsAhead",
}
"""Kind of a cluster file → class of what can be said of a job there ahead of its start."""
DEFAULT_WORKSPACE = Path(".lockstep/workspace")
"""Workspace of this machine where none is named."""


def words_to(workspace: Path) -> dict[str, object]:
    """Return the option that names a workspace of this machine on a command line, and its value."""
    if workspace == DEFAULT_WORKSPACE:
        return {"--local": True}
    return {"--cluster": str(workspace) if "/" in str(workspace) else f"./{workspace}"}


class Ahead(Protocol):
    """Answers about a job ahead of its start, when nothing needs to be there."""

    def doubts(self, resolved: Resolved) -> list[str]:
        """Return what may be wrong with a job, as far as its files say. Raises ConfigError for what is wrong."""
        return []

    def plan(self, where: NamedPlace, order: Order, resolved: Resolved, wishes: PlanWishes) -> tuple[list[Finding], Forecast]:
        """Say what would become of the job in a place, and change nothing there. Raises ConfigError for what was stated and can't be used,
        and where the place can't be asked.
        """

    def size(self, file: ClusterFile, named: str, nodes: int | None, gpus: int | None) -> tuple[Size, Iterable[str]]:
        """Return the size of a job whose file is to state so many nodes and GPUs of each, on a cluster that was given as `named`; and why
        its number of ranks isn't known.
        """
        from lockstep.plan.translate.trainer import Size

        own = file.profile.spec.gpus
        count, each = nodes or own.default_nodes, own.per_node if gpus is None else gpus
        is_stated = nodes is not None or gpus is not None
        return Size(count * max(each, 1), count if is_stated else None, each if is_stated else None), ()


def backend_class(name: str) -> type[Backend]:
    """Return the class of this name. Its module is imported only then."""
    backend: type[Backend] = resolve_name(BACKENDS[name])
    return backend


def ahead_of(kind: str) -> Ahead:
    """Return what can be said of a job on a cluster of this kind."""
    ahead: Ahead = resolve_name(AHEAD[kind])()
    return ahead


def backend_of(name: str, where: NamedPlace) -> Backend:
    """Return the backend of this name at a place."""
    return backend_class(name).at(where)
