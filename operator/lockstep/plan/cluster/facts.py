"""What one person may see of a cluster, and what not: discovery writes a file from it, lint holds a file against it (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lockstep.api.objects import Object

OPENSHIFT_GROUP = "security.openshift.io"
MULTUS_GROUP = "k8s.cni.cncf.io"


class Sight(StrEnum):
    """How a list was answered."""

    SEEN = "seen"
    FORBIDDEN = "forbidden"  # 403
    NO_SUCH_KIND = "no such kind"  # its API group is not installed


@dataclass(frozen=True)
class Listing:
    """Objects of one kind; none of them where `sight` isn't SEEN."""

    kind: str
    items: tuple[Object, ...] = ()
    sight: Sight = Sight.SEEN

    @property
    def seen(self) -> bool:
        return self.sight is Sight.SEEN

    @property
    def why_not(self) -> str:
        """Why nothing can be said; '' when they were seen."""
        if self.sight is Sight.FORBIDDEN:
            return f"you may not list {self.kind} objects (403)"
        return f"the cluster knows no {self.kind}" if self.sight is Sight.NO_SUCH_KIND else ""


@dataclass(frozen=True)
class ProbeFacts:
    """What a short-lived pod saw on one node."""

    node: str
    gpus: int = 0
    driver: str = ""
    hcas: Mapping[str, str] = field(default_factory=dict)
    """RDMA device → its ports' state, link layer and rate."""
    interfaces: Mapping[str, int] = field(default_factory=dict)
    """Network interface → MTU."""
    memlock_bytes: int | None = None
    """Null: no limit."""
    capabilities: str = ""
    """CapEff, in hexadecimal."""
    error: str = ""
    """Why there is nothing to say."""


@dataclass(frozen=True)
class ClusterFacts:
    """One look at a cluster with one person's rights."""

    server: str
    version: str
    namespace: str
    groups: frozenset[str]
    """API groups that the server has."""
    lists: Mapping[str, Listing]
    """By kind: Node, StorageClass, PersistentVolume, PersistentVolumeClaim, NetworkAttachmentDefinition, …"""
    namespace_from: str = ""
    """Who named the namespace."""
    namespace_there: bool | None = True
    """None: not for this person to see."""
    pod_security: str = ""
    """The namespace's Pod Security level, as its label says."""
    may_use_scc: Mapping[str, bool] | None = None
    """Whether the service account may use each SCC; None: not asked, or not for this person to ask."""
    probes: tuple[ProbeFacts, ...] = ()

    def list(self, kind: str) -> Listing:
        return self.lists.get(kind, Listing(kind, sight=Sight.NO_SUCH_KIND))

    @property
    def is_openshift(self) -> bool:
        return OPENSHIFT_GROUP in self.groups
