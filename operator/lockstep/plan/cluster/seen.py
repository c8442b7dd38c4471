"""What `lockstep doctor` is told and what it tells: a cluster as one person sees it, and findings (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lockstep.api.objects import Object


class Verdict(StrEnum):
    """What came of one check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"  # not for this person to see


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    subject: str
    verdict: Verdict
    said: str
    fix: str = ""
    """What to do, as a sentence or a command."""


@dataclass(frozen=True)
class Seen:
    """A cluster as one person sees it. None: that person may not read it; of what is one object, it isn't there unless `hidden` names it."""

    namespace: str
    rights: Mapping[str, bool] = field(default_factory=dict)
    """What the person may do, in the words of RIGHTS."""
    crds: Mapping[str, Object] | None = None
    """By name."""
    deployment: Object | None = None
    serves: bool | None = True
    """Whether the cluster knows TrainingJobs, which everybody may ask. None: everybody but this person."""
    may_see_operator: bool = True
    unserved: str = ""
    """Why the operator doesn't work in this namespace; "": it does."""
    operator_stuck: str = ""
    """What keeps a pod of the operator from starting."""
    profile: Object | None = None
    nodes: tuple[Object, ...] | None = None
    classes: tuple[Object, ...] | None = None
    claims: tuple[Object, ...] | None = None
    account: Object | None = None
    hidden: frozenset[str] = frozenset()
    """Kinds of which an object was asked for that this person may not read."""
    networks: frozenset[str] | None = None
    """NetworkAttachmentDefinitions of the namespace; None also where the cluster knows no such kind."""
    networks_elsewhere: Mapping[str, str] = field(default_factory=dict)
    """A rail's network that the namespace lacks → a namespace that has it."""
    dns: Mapping[str, int] | None = None
    """Ready endpoints of each of DNS_SERVICES that is there."""


DNS_SERVICES = ("kube-system/kube-dns", "openshift-dns/dns-default")
"""Kubernetes' and OpenShift's, namespace/name."""
NOT_YOURS = "your account may not read it"
RIGHTS = {
    "create TrainingJobs": ("create", "lockstep.dev", "trainingjobs", ""),
    "read logs of pods": ("get", "", "pods", "log"),
    "run programs in pods": ("create", "", "pods", "exec"),
    "create pods": ("create", "", "pods", ""),
    "create claims": ("create", "", "persistentvolumeclaims", ""),
}
"""What a user of the namespace needs: verb, API group, resource, subresource."""
