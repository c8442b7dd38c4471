"""An operator that a release of helm's has: deployments leave it to helm, and add what its chart doesn't have."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.api.errors import Failed
from lockstep.api.names import ANNOTATION_RELEASE
from lockstep.kube.cluster import FORBIDDEN, Client, Cluster, tolerated
from lockstep.plan.cluster.scope import image_of, scope_of
from lockstep.platforms.output import tell

if TYPE_CHECKING:
    from lockstep.cli.clusters.deploymentplan import DeploymentPlan
    from lockstep.kube.aim import Connections


def without_release(plan: DeploymentPlan, connections: Connections, *, is_stated: bool) -> DeploymentPlan:
    """Return the plan without objects of releases if one has the operator, and say so. `is_stated`: options name an image or namespaces.

    Raises Failed if these aren't those of the release.
    """
    client = Client(connections)
    release, operator = client.run(lambda connection: operator_release(connection, plan.objects))
    if not release:
        return plan
    if is_stated and (plan.sent_image, plan.scope) != (image_of(operator), scope_of(operator)):
        raise Failed(
            f"the operator of this cluster is helm's (release {release}), and nothing was sent: leave out --image and --namespaces, and set"
            f" image and namespaces of its chart (helm upgrade {release} CHART -n {plan.scope.home})"
        )

    async def unowned(connection: Cluster) -> list[dict[str, Any]]:
        stored = await asyncio.gather(*(_stored(connection, item) for item in plan.objects))
        return [item for item, (name, _) in zip(plan.objects, stored, strict=True) if not name]

    rest = client.run(unowned)
    tell(f"note: {len(plan.objects) - len(rest)} objects, the operator among them, stay as helm's release {release} has them")
    return replace(plan, objects=rest)


async def operator_release(cluster: Cluster, objects: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the release that the operator's Deployment on the cluster is of, and the Deployment; "" if it is of none, or can't be seen."""
    return await _stored(cluster, next(item for item in objects if item["kind"] == "Deployment"))


async def _stored(cluster: Cluster, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    metadata = item["metadata"]
    with tolerated(FORBIDDEN):
        stored = await cluster.get(item["kind"], metadata.get("namespace"), metadata["name"]) or {"metadata": {}}
        return str(stored["metadata"].get("annotations", {}).get(ANNOTATION_RELEASE, "")), stored
    return "", {}  # nor may this person change it
