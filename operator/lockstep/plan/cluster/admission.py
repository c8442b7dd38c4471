"""Admission of a deployment: what an account lacks for an operator of the whole cluster, and what it is offered instead (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.api.objects import Object
from lockstep.plan.cluster.scope import ADMISSION
from lockstep.plan.ship.deploy import CLAIM, DEFINITION, plural


class Admission(Enum):
    """Next step of a deployment."""

    AS_PLANNED = "send what the rights allow"
    OFFER_OWN = "offer an operator of one namespace"
    NEED_DEFINITIONS = "an administrator must define TrainingJobs first"


@dataclass(frozen=True)
class AccountStanding:
    """Rights of an account on a cluster, and what is there already."""

    lacks: tuple[Object, ...] = ()
    """Objects of the operator of the whole cluster that the account may not send."""
    may_have_own: bool = False
    """It may send all objects of an operator of one namespace."""
    has_operator: bool = False
    """An operator of the whole cluster, or of named namespaces, is there."""
    knows_jobs: bool = True
    """The API server knows TrainingJobs."""

    @property
    def missing(self) -> str:
        """Sentence that says what the account lacks, without its end."""
        kinds = list(dict.fromkeys(plural(item["kind"]) for item in self.lacks if "namespace" not in item["metadata"]))
        places = list(dict.fromkeys(item["metadata"]["namespace"] for item in self.lacks if "namespace" in item["metadata"]))
        parts = [*([", ".join(kinds)] if kinds else []), *(f"objects of namespace {place}" for place in places)]
        return f"your account may not install an operator of the whole cluster (it may not change {' and '.join(parts)})"


def needed_for_operator(objects: Iterable[Object]) -> list[Object]:
    """Return the objects that an operator of the whole cluster needs. CRDs and namespaces may exist already, and claims belong to the
    account that made them.
    """
    own = [item for item in objects if item["metadata"].get("namespace", OPERATOR_NAMESPACE) == OPERATOR_NAMESPACE]
    return [item for item in own if item["kind"] not in (DEFINITION, "Namespace", CLAIM, *ADMISSION)]


def admission(standing: AccountStanding) -> Admission:
    """Return how a deployment goes on if no option states the operator's namespaces."""
    if not standing.lacks or standing.has_operator or not standing.may_have_own:
        return Admission.AS_PLANNED
    return Admission.OFFER_OWN if standing.knows_jobs else Admission.NEED_DEFINITIONS
