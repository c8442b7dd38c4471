"""A cluster as one person sees it: what discover, lint, doctor and plan judge (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from lockstep.api.objects import Object
from lockstep_spec.codec import Must, no_longer

OPENSHIFT_GROUP = "security.openshift.io"
NETWORK = "NetworkAttachmentDefinition"
POD_SECURITY = "pod-security.kubernetes.io/enforce"
SCC_REVIEW = "PodSecurityPolicyReview"
"""OpenShift's answer to which service accounts may run a pod."""
DNS_SERVICES = ("kube-system/kube-dns", "openshift-dns/dns-default")
"""Kubernetes' and OpenShift's, namespace/name."""
Text = Annotated[str, no_longer(200)]
FEW = no_longer(256)
"""Bounds of what a probe lists: whoever made its image decides that."""
_HEXADECIMAL = Must("hexadecimal", lambda text: re.fullmatch("[0-9a-fA-F]{0,32}", text) is not None)
NOT_YOURS = "your account may not read it"
RIGHTS = {
    "create TrainingJobs": ("create", "TrainingJob", ""),
    "read logs of pods": ("get", "Pod", "log"),
    "run programs in pods": ("create", "Pod", "exec"),
    "create pods": ("create", "Pod", ""),
    "create claims": ("create", "PersistentVolumeClaim", ""),
}
"""Rights that a user of the namespace needs: verb, kind, subresource."""


class Sight(StrEnum):
    """Answer to a read."""

    SEEN = "seen"
    FORBIDDEN = "forbidden"  # 403
    NO_SUCH_KIND = "no such kind"  # its API group is not installed


@dataclass(frozen=True)
class Listing:
    """Objects of one kind, or the one that was asked for by name; none of them where `sight` isn't SEEN."""

    kind: str
    items: tuple[Object, ...] = ()
    sight: Sight = Sight.SEEN

    @property
    def seen(self) -> bool:
        return self.sight is Sight.SEEN

    @property
    def first(self) -> Object | None:
        return self.items[0] if self.items else None

    @property
    def why_not(self) -> str:
        """Reason that they were not seen; '' when they were."""
        if self.sight is Sight.FORBIDDEN:
            return f"you may not list {self.kind} objects (403)"
        return f"the cluster knows no {self.kind}" if self.sight is Sight.NO_SUCH_KIND else ""


@dataclass(frozen=True)
class ProbeFacts:
    """Facts that a short-lived pod saw on one node."""

    node: str = ""
    gpus: int = 0
    driver: Text = ""
    hcas: Annotated[Mapping[str, Text], FEW] = field(default_factory=dict)
    """RDMA device → its ports' state, link layer and rate."""
    interfaces: Annotated[Mapping[str, int], FEW] = field(default_factory=dict)
    """Network interface → MTU."""
    memlock_bytes: int | None = None
    """Null: no limit."""
    capabilities: Annotated[str, _HEXADECIMAL] = ""
    """CapEff, in hexadecimal."""
    error: str = ""
    """Reason that the pod saw nothing; '' if it did."""


@dataclass(frozen=True)
class Try:
    """The API server's answer to a dry run of creating an object. None of what it says has happened."""

    accepted: bool | None
    """None: it could not be asked."""
    message: str = ""
    warnings: tuple[str, ...] = ()
    admitted: Object | None = None
    """The object as the API server would store it, with what LimitRanges and webhooks have written into it."""
    fix: str = ""
    """Remedy where it could not be asked; '': an account with more rights can ask."""


@dataclass(frozen=True)
class ClusterFacts:
    """One look at a cluster with one person's rights. What a verb has not asked for is as if it were not to be seen."""

    namespace: str
    server: str = ""
    version: str = ""
    namespace_from: str = ""
    """Source of the namespace's name."""
    groups: frozenset[str] = frozenset()
    """API groups that the server has."""
    lists: Mapping[str, Listing] = field(default_factory=dict)
    """Objects by kind, of the whole cluster or of the namespace; Pods of all namespaces that have not ended."""
    objects: Mapping[tuple[str, str], Listing] = field(default_factory=dict)
    """Objects that were asked for by name, by kind and name. Seen and empty: it isn't there."""
    networks_elsewhere: Mapping[str, Listing] = field(default_factory=dict)
    """NetworkAttachmentDefinitions of other namespaces, by namespace; of all namespaces under ''."""
    own_pods: tuple[Object, ...] = ()
    """Pods of the job itself, where it runs already."""
    rights: Mapping[str, bool] = field(default_factory=dict)
    """Rights of the person, in the words of RIGHTS."""
    may_use_scc: Mapping[str, bool] | None = None
    """SCC → True if the service account may use it; None: not asked, or not for this person to ask."""
    jobs: Sight = Sight.SEEN
    """SEEN if the API server knows TrainingJobs."""
    operator_trouble: str = ""
    """Reason that a pod of the operator doesn't start; '' if none is seen."""
    tries: Mapping[str, Try] = field(default_factory=dict)
    """Kind → answer of the API server to a dry run of it; SCC_REVIEW → which SCC admits the pod."""
    probes: tuple[ProbeFacts, ...] = ()

    def list(self, kind: str) -> Listing:
        return self.lists.get(kind, Listing(kind, sight=Sight.NO_SUCH_KIND))

    def object(self, kind: str, name: str) -> Listing:
        return self.objects.get((kind, name), Listing(kind, sight=Sight.FORBIDDEN))

    def networks_of(self, namespace: str) -> Listing:
        return (
            self.list(NETWORK)
            if namespace == self.namespace
            else self.networks_elsewhere.get(namespace, Listing(NETWORK, sight=Sight.FORBIDDEN))
        )

    @property
    def is_openshift(self) -> bool:
        return OPENSHIFT_GROUP in self.groups

    @property
    def pod_security(self) -> str:
        """The namespace's Pod Security level, as its label says; '' where there is none, or it can't be seen."""
        namespace = self.object("Namespace", self.namespace).first or {"metadata": {}}
        return str((namespace["metadata"].get("labels") or {}).get(POD_SECURITY, ""))
