"""What a deployment could not send, in an administrator's words, and which claims a clean-up may take (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lockstep.api.clusterfile import ClusterFile
from lockstep.api.names import APP, DATASETS_CLAIM, LABEL_JOB, LABEL_MANAGED_BY, WORKSPACE_CLAIM
from lockstep.plan.diff import Change, changes

Object = dict[str, Any]
DEFINITION = "CustomResourceDefinition"
CLAIM = "PersistentVolumeClaim"
ONLY_CREATED = (CLAIM, "Namespace")
"""Made when missing: how they look is theirs who made them."""
VOLATILE = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")


class State(StrEnum):
    """How an object that may not be sent is found on the cluster."""

    SAME = "as it should be"
    MISSING = "missing"
    DIFFERS = "differs"
    UNSEEN = "can't be seen"


@dataclass(frozen=True)
class Left:
    """An object that was not sent, how it is found there, and the API server's reason when it refused."""

    item: Object
    state: State
    reason: str = ""


def called(item: Object) -> str:
    """Kind and name, with the namespace where there is one."""
    metadata = item["metadata"]
    return (
        f"{item['kind']} {metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else f"{item['kind']} {metadata['name']}"
    )


def state_of(item: Object, found: Object | None) -> State:
    if found is None:
        return State.MISSING
    return State.SAME if item["kind"] in ONLY_CREATED or not changes(item, found) else State.DIFFERS


def open_ones(left: Iterable[Left]) -> list[Left]:
    """Those that an administrator is needed for, as far as one can see."""
    return [part for part in left if part.state is not State.SAME]


def for_an_administrator(left: Iterable[Left]) -> tuple[list[Object], list[Object]]:
    """The CRDs, and everything else: kubectl can't send an object before the definition of its kind is known."""
    items = [part.item for part in open_ones(left)]
    return [item for item in items if item["kind"] == DEFINITION], [item for item in items if item["kind"] != DEFINITION]


def counted(objects: Iterable[Object]) -> str:
    """For example: 2 CustomResourceDefinitions, 1 Deployment."""
    counts = Counter(item["kind"] for item in objects)
    return ", ".join(f"{number} {_plural(kind) if number > 1 else kind}" for kind, number in counts.items())


def _plural(kind: str) -> str:
    return f"{kind[:-1]}ies" if kind.endswith("y") else kind if kind.endswith("s") else f"{kind}s"


def difference(after: Object, before: Object | None) -> list[Change]:
    """Every field that would be set, changed or taken away; `after` is the API server's own answer to a dry run."""
    if before is None:
        return []
    new, old = _stable(after), _stable(before)
    forward = changes(new, old)
    known = {change.path for change in forward}
    backward = [Change(change.path, change.observed, change.desired) for change in changes(old, new) if change.path not in known]
    return [*forward, *backward]


def _stable(item: Object) -> Object:
    """Without what the API server writes at every change."""
    metadata = {key: value for key, value in item["metadata"].items() if key not in VOLATILE}
    return {**{key: value for key, value in item.items() if key != "status"}, "metadata": metadata}


def removable_claims(found: ClusterFile, dev_environment: str, claims: Sequence[Object]) -> Iterator[Object]:
    """The shared claims that the cluster names and Lockstep made, and those of the dev environment's own pods. Nobody else's."""
    storage = found.profile.spec.storage
    shared = {storage.workspace_claim or WORKSPACE_CLAIM, storage.datasets_claim or DATASETS_CLAIM}
    for claim in claims:
        metadata = claim["metadata"]
        labels = metadata.get("labels") or {}
        ours = labels.get(LABEL_MANAGED_BY) == APP
        if ours and (metadata["name"] in shared or labels.get(LABEL_JOB) == dev_environment):
            yield claim
