"""A connection to a Kubernetes cluster, the namespace that is meant there, and what cluster files say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.kube.cluster import Client
    from lockstep.plan.pages.why import ClusterHome


class ClusterFiles:
    """Cluster files, which are named as `--cluster` names them. Here are none."""

    def home(self, named: str) -> ClusterHome | None:
        """Return the name and the namespace that a file of Kubernetes states; None without such a file."""
        return None

    def default_nodes(self, named: str) -> tuple[str, int] | None:
        """Return the name, and the number of nodes of a job that states none; None without a file."""
        return None


NO_FILES = ClusterFiles()


@dataclass(frozen=True)
class Target:
    """A connection, and the namespace of the cluster file."""

    client: Client
    namespace: str
    cluster: str
    """Name that was given: a cluster of clusters/, or the path of a file."""
    options: str = ""
    """Options that lead to the same API server again, with a space in front; "" where verbs ask it by themselves."""
    is_stand_in: bool = False
    """Nothing names the cluster: its file stands in for that of the kubeconfig."""
    is_known: bool = True
    """Its file is about this API server: a named one, or the embedded cluster's."""
    context: str | None = None
    """Context of the kubeconfig, if one was stated."""
    files: ClusterFiles = NO_FILES
