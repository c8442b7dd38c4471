"""Objects that a deployment could not send, as an administrator sees them, fields that stored objects would lose to its CRDs, and objects
that a clean-up or the end of one cluster may take (pure).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lockstep.api.cluster import Platform
from lockstep.api.files.clusterfile import ClusterFile
from lockstep.api.names import ANNOTATION_DEFAULT_CLUSTER, APP, LABEL_JOB, LABEL_MANAGED_BY
from lockstep.api.objects import CLAIM, DEFINITION, Object, has_ended, plural
from lockstep.api.sccs import RDMA_SCC
from lockstep.plan.diff import Change, changes
from lockstep.plan.ship.openshift import puller
from lockstep_spec.words import listed

CLUSTER = "TrainingCluster"
RDMA_RIGHTS = ("ClusterRole", "SecurityContextConstraints")
"""Kinds of what is called RDMA_SCC, and sent for clusters on OpenShift only."""
ONLY_CREATED = (CLAIM, "Namespace")
"""Kinds that are created when missing and never changed: they belong to whoever made them."""
SHOWN = 20
"""Lines about stored objects that are shown."""
KEPT = ("apiVersion", "kind", "metadata")
PRESERVES = "x-kubernetes-preserve-unknown-fields"
VOLATILE = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")


class State(StrEnum):
    """State on the cluster of an object that may not be sent."""

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


def delete_command(item: Object) -> str:
    """Return the command that deletes it."""
    metadata = item["metadata"]
    place = f" -n {metadata['namespace']}" if "namespace" in metadata else ""
    return f"kubectl delete {item['kind'].lower()} {metadata['name']}{place}"


def state_of(item: Object, observed: Object | None) -> State:
    if observed is None:
        return State.MISSING
    return State.SAME if item["kind"] in ONLY_CREATED or not changes(item, observed) else State.DIFFERS


def unsent(left: Iterable[Left]) -> list[Left]:
    """Objects that need an administrator, as far as this account can see."""
    return [part for part in left if part.state is not State.SAME]


def objects_for_administrator(items: Sequence[Object]) -> tuple[list[Object], list[Object]]:
    """Return the CRDs, and everything else: kubectl can't send an object before the definition of its kind is known."""
    return [item for item in items if item["kind"] == DEFINITION], [item for item in items if item["kind"] != DEFINITION]


def counted(objects: Iterable[Object]) -> str:
    """Number of objects of each kind, for example `2 CustomResourceDefinitions, 1 Deployment`."""
    counts = Counter(item["kind"] for item in objects)
    return ", ".join(f"{number} {plural(kind) if number > 1 else kind}" for kind, number in counts.items())


def difference(after: Object, before: Object | None) -> list[Change]:
    """Every field that would be set, changed or taken away; `after` is the API server's own answer to a dry run."""
    if before is None:
        return []
    new, old = _stable(after), _stable(before)
    forward = changes(new, old)
    paths = {change.path for change in forward}
    backward = [Change(change.path, change.observed, change.desired) for change in changes(old, new) if change.path not in paths]
    return [*forward, *backward]


def _stable(item: Object) -> Object:
    """The object without what the API server writes at every change."""
    metadata = {key: value for key, value in item["metadata"].items() if key not in VOLATILE}
    return {**{key: value for key, value in item.items() if key != "status"}, "metadata": metadata}


def lost_fields(item: Object, schema: Object) -> list[str]:
    """Paths that the API server would prune from `item` by a CRD's openAPIV3Schema. `[]` is any item of a list."""
    return list(dict.fromkeys(_pruned({key: value for key, value in item.items() if key not in KEPT}, schema, "")))


def _pruned(value: Any, schema: Object, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value if "items" in schema else []:
            yield from _pruned(item, schema["items"], f"{path}[]")
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, inner in value.items():
            place = f"{path}.{key}" if path else key
            if key in known or others is not None:
                yield from _pruned(inner, known.get(key, others), place)
            elif not schema.get(PRESERVES):
                yield place


def loss_lines(items: Iterable[Object], schema: Object) -> list[str]:
    """A sentence about each object that would lose fields."""
    return [f"{called(item)} would lose {listed(fields)}" for item in items if (fields := lost_fields(item, schema))]


def shown_lines(lines: Sequence[str]) -> list[str]:
    """At most SHOWN lines, and how many more there are."""
    return [*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]


def removable_claims(file: ClusterFile, dev_environment: str, claims: Sequence[Object]) -> Iterator[Object]:
    """The shared claims that the cluster names and Lockstep made, and those of the dev environment's own pods. Nobody else's."""
    storage = file.profile.spec.storage
    shared = {storage.workspace_claim, storage.datasets_claim}
    for claim in claims:
        metadata = claim["metadata"]
        labels = metadata.get("labels") or {}
        ours = labels.get(LABEL_MANAGED_BY) == APP
        if ours and (metadata["name"] in shared or labels.get(LABEL_JOB) == dev_environment):
            yield claim


def is_default(cluster: Object) -> bool:
    """True if jobs that name no TrainingCluster use this one."""
    return bool((cluster["metadata"].get("annotations") or {}).get(ANNOTATION_DEFAULT_CLUSTER) == "true")


def jobs_using(name: str, clusters: Iterable[Object], jobs: Iterable[Object]) -> list[Object]:
    """Jobs of the TrainingCluster that have not ended: by its name, or by none where it is the default."""
    names = {name, *(None for cluster in clusters if cluster["metadata"]["name"] == name and is_default(cluster))}
    return [job for job in jobs if not has_ended(job.get("status") or {}) and job["spec"].get("cluster") in names]


def objects_of_cluster(
    sent: Iterable[Object], name: str, namespace: str, clusters: Iterable[Object], others: Iterable[Object]
) -> list[Object]:
    """Objects that go with one TrainingCluster while Lockstep and other clusters stay, in that order, out of all that its file had `sent`.

    The right to RDMA on OpenShift stays while another cluster is there that may need it, the right to pull from beside the operator while
    anything in `others` has it: what the deployments of other files have sent, and the namespace's jobs.
    """
    needs_rights = any(
        cluster["metadata"]["name"] != name and cluster["spec"].get("platform", Platform.OPENSHIFT.value) == Platform.OPENSHIFT.value
        for cluster in clusters
    )
    needed_names = {called(item) for item in others}
    pulls = called(puller(namespace))
    needed = any(item["kind"] == "TrainingJob" and item["metadata"]["namespace"] == namespace for item in others)
    removed = []
    for item in sent:
        is_right = item["kind"] in RDMA_RIGHTS and item["metadata"]["name"] == RDMA_SCC and not needs_rights
        is_puller = called(item) == pulls and not needed
        if called(item) not in needed_names and (is_right or is_puller or called(item) == f"{CLUSTER} {name}"):
            removed.append(item)
    return removed
