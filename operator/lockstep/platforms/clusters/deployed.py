"""State of Lockstep's deployment on a cluster, as far as one person may see it. Reads only, and raises as `facts` does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lockstep.api.names import OPERATOR_NAME
from lockstep.kube.cluster import Cluster
from lockstep.plan.cluster import scope
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.scope import NAMED_BINDING, Scope, image_of, scope_of
from lockstep.platforms.clusters.facts import read_operator, read_profile
from lockstep.platforms.clusters.listings import read_object

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster
    from lockstep.api.job import TrainingJob


async def as_deployed(cluster: Cluster, profile: str, namespace: str) -> tuple[str | None, str | None, Scope]:
    """`network.mode` of the cluster that is there, the image of the operator and where it works; None: not there, or not to be seen."""
    deployment = (await read_operator(cluster, namespace)).first
    deployed = (await read_profile(cluster, profile, namespace)).first or {}
    mode = deployed.get("spec", {}).get("network", {}).get("mode")
    if deployment is None:
        return mode, None, Scope()
    return mode, image_of(deployment), scope_of(deployment)


async def with_image(cluster: Cluster, job: TrainingJob, profile: TrainingCluster, namespace: str) -> TrainingCluster:
    """The TrainingCluster with the image that the operator there would take, as far as it can be seen, where neither it nor the job names one."""
    if job.spec.image or profile.spec.image:
        return profile
    from lockstep.plan.render.resolve import trainer_image

    deployment = (await read_operator(cluster, namespace)).first
    image = None if deployment is None else trainer_image(image_of(deployment))
    return profile.model_copy(update={"spec": profile.spec.model_copy(update={"image": image})})


async def unserved(cluster: Cluster, namespace: str) -> str:
    """Reason that no operator works in this namespace; "" where one does, as far as this person may see."""
    operator, binding, account = await asyncio.gather(
        read_operator(cluster, namespace),
        read_object(cluster, "RoleBinding", namespace, NAMED_BINDING),
        read_object(cluster, "ServiceAccount", namespace, OPERATOR_NAME),
    )
    objects = {("Deployment", OPERATOR_NAME): operator, ("RoleBinding", NAMED_BINDING): binding, ("ServiceAccount", OPERATOR_NAME): account}
    return scope.unserved(ClusterFacts(namespace, objects=objects))
