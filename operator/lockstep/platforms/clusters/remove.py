"""Takes Lockstep away again: the dev environment of one namespace, or the operator of the whole cluster."""

from __future__ import annotations

from lockstep.api.names import APP, DEV_ENVIRONMENT, KEY_SECRET, LABEL_JOB, LABEL_MANAGED_BY, OPERATOR_NAMESPACE, TLS_SECRET
from lockstep.api.objects import CLAIM, Object
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster
from lockstep.plan.cluster.facts import Sight
from lockstep.plan.cluster.scope import EVERYWHERE, Scope
from lockstep.plan.ship.deploy import called
from lockstep.platforms.clusters.install import InstallError, Say, polled
from lockstep.platforms.clusters.listings import forbidden, sight_of_jobs
from lockstep.platforms.clusters.record import NAME as RECORD

GONE_SECONDS = 120.0
JOB = "TrainingJob"


async def remove_dev_environment(cluster: Cluster, namespace: str, say: Say) -> None:
    """Remove the dev environment, and wait until its pods are gone: they save first. Raises InstallError, ApiError."""
    await _remove_jobs(cluster, [job for job in await all_of(cluster, JOB, namespace) if job["metadata"]["name"] == DEV_ENVIRONMENT], say)


async def all_of(cluster: Cluster, kind: str, namespace: str | None = None) -> list[Object]:
    """Return every object of one of Lockstep's kinds; none where there are no CRDs."""
    try:
        items: list[Object] = (await cluster.list(kind, namespace))["items"]
    except ApiError as error:
        # The API server refuses an account without rights on a kind before it looks whether the kind exists.
        if error.status == NOT_FOUND or (error.status == FORBIDDEN and await sight_of_jobs(cluster) is Sight.NO_SUCH_KIND):
            return []
        raise
    return items


async def may_not_delete(cluster: Cluster, objects: list[Object]) -> list[Object]:
    """Those of `objects` that this person may not delete. Nothing is tried."""
    return await forbidden(cluster, {}, ("delete",), objects)


async def remove(cluster: Cluster, objects: list[Object], say: Say) -> None:
    """Delete the objects in the order given; what is not there is no error."""
    for item in objects:
        place = (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
        if await cluster.get(*place) is not None:
            await cluster.delete(*place)
            say(f"removed {called(item)}")


def uninstalled(objects: list[Object], home: str = OPERATOR_NAMESPACE) -> list[Object]:
    """Objects that `uninstall` removes, in order: all that was sent but claims, and namespaces, which people may have filled."""
    own = [_stub("Secret", name, home) for name in (KEY_SECRET, TLS_SECRET)] + [_stub("ConfigMap", RECORD, home)]
    return [*reversed([item for item in objects if item["kind"] not in (CLAIM, "Namespace")]), *own]


def _stub(kind: str, name: str, namespace: str) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace}}


async def uninstall(cluster: Cluster, objects: list[Object], say: Say, scope: Scope = EVERYWHERE, with_jobs: bool = True) -> None:
    """Jobs first (their pods end with them), then everything but claims, and the operator's namespace when it holds none. May be
    repeated.
    """
    if with_jobs:
        await _remove_jobs(cluster, await all_of(cluster, JOB, scope.home if scope.own else None), say)
    await remove(cluster, uninstalled(objects, scope.home), say)
    if scope.own:
        return
    if (await cluster.list(CLAIM, OPERATOR_NAMESPACE))["items"]:
        say(f"Namespace {OPERATOR_NAMESPACE} stays: it holds claims")
    else:
        await remove(cluster, [item for item in objects if called(item) == f"Namespace {OPERATOR_NAMESPACE}"], say)


async def _remove_jobs(cluster: Cluster, jobs: list[Object], say: Say) -> None:
    await remove(cluster, jobs, say)
    pods: list[Object] = []
    places = {(job["metadata"]["namespace"], job["metadata"]["name"]) for job in jobs}
    async for _ in polled(GONE_SECONDS):
        pods = [pod for place in sorted(places) for pod in await _pods(cluster, *place)]
        if not pods:
            return
    raise InstallError(
        f"pods of deleted jobs are still there after {GONE_SECONDS:.0f} s: {', '.join(pod['metadata']['name'] for pod in pods)}: "
        f"kubectl get pods -A -l {LABEL_JOB}"
    )


async def _pods(cluster: Cluster, namespace: str, job: str) -> list[Object]:
    selector = {"labelSelector": f"{LABEL_JOB}={job},{LABEL_MANAGED_BY}={APP}"}
    pods: list[Object] = (await cluster.list("Pod", namespace, selector))["items"]
    return pods
