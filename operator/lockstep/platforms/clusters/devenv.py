"""The dev environment: an Interactive TrainingJob that `lockstep deploy` makes once and then leaves to its people."""

from __future__ import annotations

import re
from typing import Any

from lockstep.api.cluster import TrainingCluster
from lockstep.api.job import Fabric
from lockstep.api.names import API_VERSION, DEV_ENVIRONMENT, LABEL_JOB, OPERATOR_NAME
from lockstep.api.objects import CLAIM, DEFINITION, Object, condition, is_running, is_true
from lockstep.api.sccs import RDMA_SCC
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.layers import Notice
from lockstep.plan.reasons import Reason
from lockstep.plan.render.fabric import Transport, choose_transport
from lockstep.plan.ship.deploy import CLUSTER, State, called
from lockstep.plan.waiting.containers import missing_object
from lockstep.platforms.clusters.install import InstallError, Say, polled
from lockstep.platforms.clusters.listings import read_object
from lockstep.platforms.clusters.send import Sent
from lockstep.platforms.clusters.waits import Stuck

KIND = "TrainingJob"
NEEDED = (DEFINITION, CLUSTER, CLAIM, "Namespace", "ServiceAccount")  # kinds without which no pod of it starts
UP = ("Ready", "Running")
"""Reasons of Progressing: it waits for a script, or one runs."""


class UnknownToOperator(InstallError):
    """The operator doesn't have the dev environment's TrainingCluster."""


def dev_environment(profile: TrainingCluster, namespace: str) -> Object:
    """Everything else is the cluster's: GPUs, fabric, storage, image. Its nodes are stated because `kubectl scale` changes a number that is
    there.
    """
    metadata = {"name": DEV_ENVIRONMENT, "namespace": namespace}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {"cluster": profile.metadata.name, "type": "Interactive", "nodes": profile.spec.gpus.default_nodes},
    }


async def lacking(cluster: Cluster, profile: TrainingCluster, namespace: str, home: str, sent: Sent) -> str:
    """Return what a dev environment lacks for a start after this deployment; '' where nothing is known to be missing. `home`: the
    operator's namespace.
    """
    uses_rdma = choose_transport(Fabric(), profile.spec.network, profile.spec.gpus.per_node).value is Transport.RDMA
    items = [part.item for part in sent.left if part.state is State.MISSING]
    here = [item for item in items if item["metadata"].get("namespace", namespace) == namespace]
    missing = [called(item) for item in here if item["kind"] in NEEDED or (uses_rdma and item["metadata"]["name"] == RDMA_SCC)]
    if missing or sent.has("Deployment"):
        return f"there is no {missing[0]}" if missing else ""
    lease = await read_object(cluster, "Lease", home, OPERATOR_NAME)  # which everybody may read where an operator is
    return "" if lease.first is not None else f"no operator is to be seen in namespace {home}"


async def ensure_dev_environment(cluster: Cluster, job: Object) -> tuple[str, bool]:
    """Make it when it is missing. One that is there stays as its people have it: an edit would wait for its next start anyhow.

    What was found, in a few words, and whether it is to have pods. Raises ApiError, InstallError.
    """
    namespace = job["metadata"]["namespace"]
    existing = await cluster.get(KIND, namespace, DEV_ENVIRONMENT)
    if existing is None:
        await cluster.create(job)
        return "made", True
    if existing["spec"].get("type") != "Interactive":
        raise InstallError(
            f"TrainingJob {DEV_ENVIRONMENT} of namespace {namespace} is not a dev environment but another job: it stays as it is; --no-dev"
            " leaves out the dev environment"
        )
    status = existing.get("status") or {}
    if existing["spec"].get("suspend") or "released" in (status.get("interactive") or {}):
        return f"is there already, stopped and without pods: lockstep resume {DEV_ENVIRONMENT} -n {namespace}", False
    waits = status.get("run", {}).get("pending")
    return ("is there already; what has changed takes effect at its next start" if waits else "is there already"), True


STUCK = frozenset({
    Reason.PODS_REFUSED, Reason.IMAGE_PULL_FAILED, Reason.CONTAINER_FAILED, Reason.CONTAINER_NOT_STARTED, Reason.POD_FAILED,
    Reason.DNS_UNAVAILABLE, Reason.NAME_NOT_FOUND, Reason.NETWORK_BLOCKED, Reason.REPORT_REFUSED,
})  # fmt: skip


async def until_up(cluster: Cluster, namespace: str, nodes: int, tell: Say, seconds: float) -> list[Object]:
    """Its pods, once all of them run. Raises InstallError with what the cluster says of it."""
    text = "nothing is known of it yet: does the operator run?"
    stuck = Stuck()
    async for _ in polled(seconds):
        job = await cluster.get(KIND, namespace, DEV_ENVIRONMENT) or {"spec": {}}
        status = job.get("status") or {}
        expected = int(job["spec"].get("nodes") or nodes)
        _raise_if_hopeless(status, namespace)
        pods = await _pods(cluster, namespace)
        running = [pod for pod in pods if is_running(pod) and "deletionTimestamp" not in pod["metadata"]]
        is_ready = is_true(status, "Progressing") and condition(status, "Progressing")["reason"] in UP  # all agents have found each other
        if len(running) == expected and is_ready:
            return sorted(running, key=lambda pod: str(pod["metadata"]["name"]))
        text = how_far(len(running), expected, status)
        if stuck.lasts(trouble := _trouble(status)):
            raise InstallError(f"{DEV_ENVIRONMENT} can't start: {trouble}: lockstep why {DEV_ENVIRONMENT} -n {namespace}")
        tell(text)
    raise InstallError(f"{DEV_ENVIRONMENT} is not up after {seconds:.0f} s: {text}: lockstep why {DEV_ENVIRONMENT} -n {namespace}")


def _raise_if_hopeless(status: Object, namespace: str) -> None:
    accepted = condition(status, "Accepted")
    if accepted.get("status") == "False" and accepted.get("reason") != Reason.PREVIOUS_JOB_REMAINS:  # which passes by itself
        error = UnknownToOperator if accepted.get("reason") == Reason.CLUSTER_NOT_FOUND else InstallError
        raise error(f"{DEV_ENVIRONMENT} is not accepted: {accepted.get('message', accepted.get('reason', ''))}")
    if is_true(status, "Failed"):
        message = condition(status, "Failed").get("message", "")
        again = f"lockstep retry {DEV_ENVIRONMENT} -n {namespace} starts it again"
        raise InstallError(f"{DEV_ENVIRONMENT} has failed: {message}: once that is mended, {again}")


_COUNTED = re.compile(r"^\d+ of \d+ pods (?:run|created)(?:: |$)")
"""The operator's own count, a moment older than the one that was made here; what follows it is the cause."""


def how_far(running: int, expected: int, status: Object) -> str:
    """Progress in words: how many of its pods run, and what the operator says that it waits for."""
    why = _COUNTED.sub("", _why(status))
    return f"{running} of {expected} pods run" + (f": {why}" if why else "")


def _why(status: Object) -> str:
    for kind in ("Accepted", "PodsScheduled", "RanksReady", "Progressing"):
        state: dict[str, Any] = condition(status, kind)
        if state.get("status") == "False" and state.get("message"):
            return str(state["message"])
    return ""


def _trouble(status: Object) -> str:
    """Reason that its pods don't run, if it doesn't pass by itself."""
    states = [state for kind in ("PodsScheduled", "RanksReady") if (state := condition(status, kind)).get("status") == "False"]
    whys = [Notice(str(state.get("reason", "")), str(state.get("message", ""))) for state in states]
    return next((why.message for why in whys if why.reason in STUCK or missing_object(why)), "")


async def _pods(cluster: Cluster, namespace: str) -> list[Object]:
    try:
        pods: list[Object] = (await cluster.list("Pod", namespace, {"labelSelector": f"{LABEL_JOB}={DEV_ENVIRONMENT}"}))["items"]
    except ApiError as error:
        raise InstallError(f"the pods of {DEV_ENVIRONMENT} can't be looked at: {error}") from error
    return pods
