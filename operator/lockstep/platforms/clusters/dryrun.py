"""What sending an object would change on a cluster, by the API server's own dry run."""

from __future__ import annotations

from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, ApiError, Cluster
from lockstep.plan.diff import Change, changes
from lockstep.plan.ship.deploy import ONLY_CREATED, difference
from lockstep.platforms.clusters.install import FIELD_MANAGER

LOOKS = 5  # at most, at an object that others write meanwhile


async def would_change(cluster: Cluster, item: Object) -> list[Change] | None:
    """None: it is not there. One that may only be read is compared field by field. Raises ApiError for any other refusal."""
    metadata = item["metadata"]
    found: list[Change] = []
    for _ in range(LOOKS):
        before = await cluster.get(item["kind"], metadata.get("namespace"), metadata["name"])
        if before is None or item["kind"] in (*ONLY_CREATED, "TrainingJob"):  # of which an existing one stays as it is
            return None if before is None else []
        try:
            after = await cluster.apply(item, manager=FIELD_MANAGER, strict=True, dry_run=True)
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            return changes(item, before)
        found = difference(after, before)
        if after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]:  # nobody wrote in between
            break
    return found
