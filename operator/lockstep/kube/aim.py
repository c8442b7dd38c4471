"""Aim of connections: the cluster that they are for, and the kubeconfig that leads there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lockstep_spec.files import expanded

if TYPE_CHECKING:
    from lockstep.kube.kubeconfig import Server


@dataclass(frozen=True)
class Kubeconfig:
    """Files that name clusters, users and contexts."""

    paths: str
    """Paths as KUBECONFIG has them, with colons between several."""
    is_stated: bool = True
    """KUBECONFIG or a verb names them; else this is where kubectl looks."""

    @property
    def exists(self) -> bool:
        """True if somebody names them, or the file is there."""
        return self.is_stated or Path(self.paths).exists()


def environment_kubeconfig() -> Kubeconfig:
    """Return what KUBECONFIG names now, else ~/.kube/config."""
    stated = os.environ.get("KUBECONFIG")
    return Kubeconfig(stated, True) if stated else Kubeconfig(str(expanded("~/.kube/config")), False)


class Aim(Protocol):
    """The cluster that connections are for."""

    def kubeconfig(self, context: str | None) -> Kubeconfig:
        """Return the files that lead to it. Raises ConfigError when it isn't up."""

    def check(self, server: str, context: str | None) -> None:
        """Raise ConfigError if this API server is another cluster's. Called before anything is sent to it."""


class _Anywhere:
    """Whichever cluster the kubeconfig names."""

    def kubeconfig(self, context: str | None) -> Kubeconfig:
        return environment_kubeconfig()

    def check(self, server: str, context: str | None) -> None: ...


ANYWHERE = _Anywhere()


@dataclass
class Connections:
    """The way of connections to a cluster."""

    context: str | None = None
    """Context of the kubeconfig; None: its current one."""
    aim: Aim = ANYWHERE
    servers: dict[tuple[str, str | None], Server] = field(default_factory=dict)
    """Servers of kubeconfigs that were read, by paths and context, so that a login program runs once."""

    def kubeconfig(self) -> Kubeconfig:
        """Return the files that lead to the cluster. Raises ConfigError when it isn't up."""
        return self.aim.kubeconfig(self.context)
