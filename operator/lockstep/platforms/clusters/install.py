"""Objects that `lockstep deploy` sends: CRDs, the operator, the TrainingCluster, and what jobs need in their namespace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

from lockstep.api.cluster import ClusterVolume, Platform, TrainingCluster
from lockstep.api.errors import Failed
from lockstep.api.files.yamltext import load_all_yaml, load_yaml
from lockstep.api.names import (
    ANNOTATION_DEFAULT_CLUSTER,
    APP,
    CODE_MOUNT,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    OPERATOR_NAMESPACE,
)
from lockstep.api.objects import CLAIM, Object, condition, uid_of
from lockstep.api.sccs import RDMA_SCC
from lockstep.kube.cluster import CONFLICT, Cluster, tolerated
from lockstep.kube.kinds import KINDS
from lockstep.plan.cluster.scope import EVERYWHERE, Scope, scoped, with_profile_hash
from lockstep.plan.observed import event_time
from lockstep.plan.render.fabric import Transport
from lockstep.plan.render.objects import claim_object
from lockstep.plan.render.security import USER_ID, locks_memory_as_root
from lockstep.plan.render.storage import cluster_claim
from lockstep.plan.ship.deploy import CLUSTER, is_default
from lockstep.plan.ship.openshift import operator_reference, puller
from lockstep.plan.waiting.containers import OF_THE_OPERATOR, start_phase
from lockstep.plan.waiting.notcreated import explained
from lockstep.platforms.clusters.listings import list_kind
from lockstep.platforms.clusters.waits import Stuck, Wait, why_pods_wait

Say = Callable[[str], None]
FIELD_MANAGER = "lockstep-deploy"
READY_SECONDS = 120.0
HASH_LABEL = "pod-template-hash"
ANNOTATION_REVISION = "lockstep.dev/revision"
PULL_FAILED = ("ErrImagePull", "ErrImageNeverPull", "InvalidImageName")
"""Said right after an attempt. ImagePullBackOff is said between two, also when the next one will find what was pushed meanwhile."""
BACKED_OFF = "ImagePullBackOff"
MONITORING_GROUP = "monitoring.coreos.com"


class InstallError(Failed):
    """The operator did not become ready or something did not go away. The message says what the cluster tells about it."""


def kustomized(folder: Path) -> list[Object]:
    """The objects of a kustomization that only lists resources, in its order."""
    listed = load_yaml((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    objects: list[Object] = []
    for name in listed["resources"]:
        path = folder / name
        objects += kustomized(path) if path.is_dir() else read_objects(path)
    return objects


def read_objects(path: Path) -> list[Object]:
    return [item for item in load_all_yaml(path.read_text(encoding="utf-8")) if item]


def definitions(manifests: Path) -> list[Object]:
    """Return the CRDs, in the order in which they are sent."""
    return [item for path in sorted((manifests / "crds").glob("*.yaml")) for item in read_objects(path)]


def operator_objects(
    profile: TrainingCluster, image: str, *, namespace: str, manifests: Path, revision: str = "", scope: Scope = EVERYWHERE
) -> list[Object]:
    """Everything that deploy sends, in order. `image` is the operator's; jobs are to run in `namespace`, which `scope` includes.

    A new `revision` starts the operator again: its code may come from a volume that changes under the same image.
    Claims are to be created when missing and never changed (`install` does so); everything else is applied.
    """
    on_openshift = profile.spec.platform is Platform.OPENSHIFT
    overlay = "openshift" if on_openshift else "kubernetes"
    named = operator_reference(image, profile.spec.platform, scope.home)
    operator = [_adapted(item, profile, named, revision) for item in kustomized(manifests / "operator" / "overlays" / overlay)]
    first = [item for item in operator if item["kind"] == "Namespace"]
    spaces = first if namespace == OPERATOR_NAMESPACE else [*first, _namespace(namespace)]
    mounted = {scope.home: code_volumes(profile)} | {namespace: profile.spec.pod.volumes}
    claims = [
        claim_object(cluster_claim(volume), name, _labels())
        for name, volumes in mounted.items()
        for volume in volumes
        if volume.storage_class
    ]
    rest = [item for item in operator if item["kind"] != "Namespace"]
    places = (namespace, *(name for name in scope.namespaces if name != namespace))
    rest += [puller(place) for place in places if on_openshift and place != scope.home]
    accounts = [item for place in places for item in objects_for_jobs(profile, place)]
    every = [*definitions(manifests), *spaces, *claims, _profile_object(profile), *accounts, *rest]
    return with_profile_hash(scoped(every, scope))


def monitoring_objects(manifests: Path) -> list[Object]:
    """Objects that let Prometheus and Grafana see the operator."""
    return kustomized(manifests / "monitoring")


async def without_unknown_kinds(cluster: Cluster, objects: list[Object], say: Say) -> list[Object]:
    """Without objects of the Prometheus operator where its CRDs are missing."""
    known_objects = []
    for item in objects:
        group, _, _ = item["apiVersion"].rpartition("/")
        crd = f"{KINDS[item['kind']].plural}.{group}"
        if group == MONITORING_GROUP and await cluster.get("CustomResourceDefinition", None, crd) is None:
            say(f"left out {item['kind']} {item['metadata']['name']}: this cluster has no CRD {crd}")
        else:
            known_objects.append(item)
    return known_objects


async def with_one_default(cluster: Cluster, objects: list[Object], say: Say) -> list[Object]:
    """Without the mark of a default on the TrainingCluster where another one has it: with two, jobs that name no cluster would not
    start.
    """
    clusters = (await list_kind(cluster, CLUSTER)).items  # what can't be seen is not sent either; without the CRD there is no other cluster
    sent = {item["metadata"]["name"] for item in objects if item["kind"] == CLUSTER}
    other = next((name for name in (item["metadata"]["name"] for item in clusters if is_default(item)) if name not in sent), None)
    if other is None:
        return objects
    say(
        f"default: TrainingCluster {other} stays the default of jobs that name none; jobs for another one say cluster:"
        f" {', '.join(sorted(sent))}"
    )
    return [_without_default(item) if item["kind"] == CLUSTER else item for item in objects]


def _without_default(profile: Object) -> Object:
    metadata = profile["metadata"]
    annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if key != ANNOTATION_DEFAULT_CLUSTER}
    return {**profile, "metadata": {**metadata, "annotations": annotations}}


def _namespace(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _labels() -> dict[str, str]:
    return {LABEL_NAME: APP, LABEL_MANAGED_BY: APP}


def _profile_object(profile: TrainingCluster) -> Object:
    metadata = {"name": profile.metadata.name, "annotations": {**profile.metadata.annotations, ANNOTATION_DEFAULT_CLUSTER: "true"}}
    return {"apiVersion": profile.api_version, "kind": profile.kind, "metadata": metadata, "spec": profile.spec.to_dict()}


def objects_for_jobs(profile: TrainingCluster, namespace: str) -> list[Object]:
    """The service account that pods of jobs run as, and on OpenShift its right to the SCC when RDMA needs it."""
    account = profile.spec.security.service_account
    objects: list[Object] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": namespace, "labels": _labels()}}
    ]
    if profile.spec.platform is Platform.OPENSHIFT and locks_memory_as_root(profile.spec, Transport.RDMA):
        objects.append(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": {"name": RDMA_SCC, "namespace": namespace, "labels": _labels()},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": RDMA_SCC},
                "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
            }
        )
    return objects


def code_volumes(profile: TrainingCluster) -> list[ClusterVolume]:
    """Those that the operator has, too; at most one."""
    return [volume for volume in profile.spec.pod.volumes if volume.mount_path == CODE_MOUNT]


def _adapted(item: Object, profile: TrainingCluster, image: str, revision: str) -> Object:
    """The Deployment with its image, and the cluster's pull secrets, variables and volume of code; every other object as its file has it.

    Not with other volumes, which hold models and the like, nor with tolerations: they let jobs onto GPU nodes, where the operator has
    nothing to do.
    """
    if item["kind"] != "Deployment":
        return item
    if revision:
        item["spec"]["template"]["metadata"]["annotations"] = {ANNOTATION_REVISION: revision}
    pod = item["spec"]["template"]["spec"]
    container = pod["containers"][0]
    volumes = code_volumes(profile)
    container["image"] = image
    container["env"] = [
        *({**variable, "value": image} if variable["name"] == "LOCKSTEP_AGENT_IMAGE" else variable for variable in container["env"]),
        *({"name": v.name, "value": v.value.replace("$", "$$")} for v in profile.spec.pod.env),
    ]
    container["volumeMounts"] += [{"name": v.name, "mountPath": v.mount_path, "readOnly": True} for v in volumes]
    pod["volumes"] += [{"name": v.name, "persistentVolumeClaim": {"claimName": v.claim, "readOnly": True}} for v in volumes]
    if profile.spec.pod.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in profile.spec.pod.image_pull_secrets]
    if profile.spec.platform is Platform.KUBERNETES:
        pod["securityContext"] |= {"runAsUser": USER_ID, "runAsGroup": USER_ID}
    return item


async def send_one(cluster: Cluster, item: Object) -> None:
    """A claim is only made when missing. Raises ApiError."""
    if item["kind"] != CLAIM:
        await cluster.apply(item, manager=FIELD_MANAGER, strict=True)
        return
    with tolerated(CONFLICT):  # it is there
        await cluster.create(item)


async def polled(seconds: float) -> AsyncIterator[None]:
    """Ticks until the time is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        yield
        await asyncio.sleep(0.25)


async def until_established(cluster: Cluster, name: str) -> None:
    async for _ in polled(READY_SECONDS):
        definition = await cluster.get("CustomResourceDefinition", None, name) or {}
        if any(
            c["type"] == "Established" and c["status"] == "True" for c in definition.get("status", {}).get("conditions") or []
        ):  # null at first
            return
    raise InstallError(f"CustomResourceDefinition {name} is not established after {READY_SECONDS:.0f} s")


async def until_ready(cluster: Cluster, namespace: str, name: str, tell: Say = lambda text: None, seconds: float = READY_SECONDS) -> None:
    """`tell` hears how many replicas are ready whenever it is looked. Raises InstallError."""
    wait, stuck, due = Wait(), Stuck(), 0.0
    async for _ in polled(seconds):
        deployment = await cluster.get("Deployment", namespace, name) or {"metadata": {}}
        status = deployment.get("status", {})
        is_current = status.get("observedGeneration") == deployment["metadata"].get("generation")
        counts = {status.get(count) for count in ("replicas", "updatedReplicas", "readyReplicas")}
        if is_current and counts == {deployment.get("spec", {}).get("replicas", 0)}:
            return
        if (now := asyncio.get_running_loop().time()) >= due:
            due = now + 1.0  # (reasons are lists of pods, Events and claims)
            if unpulled := await unpulled_image(cluster, namespace, deployment):
                raise InstallError(unpulled)
            wait = await operator_wait(cluster, namespace, deployment) if is_current else Wait()
        if stuck.lasts(wait.lasting):
            raise InstallError(f"the operator can't start: {wait.message}")
        tell(
            f"{status.get('readyReplicas', 0)} of {deployment.get('spec', {}).get('replicas', 0)} ready"
            + (f"; {wait.message}" if wait.message else "")
        )
    why = wait.message or await _unready(cluster, namespace) or f"kubectl describe pods -n {namespace} says more"
    raise InstallError(f"the operator is not ready after {seconds:.0f} s: {why}")


async def unpulled_image(cluster: Cluster, namespace: str, deployment: Object, reasons: Collection[str] = PULL_FAILED) -> str:
    """That a container of the image that is wanted now waits for one of these `reasons`, and what to type; '' while none does."""
    images = [container["image"] for container in deployment.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])]
    for pod in await _pods(cluster, namespace):
        states = [container.get("state", {}).get("waiting", {}) for container in pod.get("status", {}).get("containerStatuses", [])]
        failed = next((state for state in states if state.get("reason") in reasons), None)
        if failed is not None and [container["image"] for container in pod["spec"]["containers"]] == images:
            return (
                f"the operator's image {', '.join(images)} can't be pulled ({failed.get('message', failed['reason'])}): build and push one "
                "(lockstep build operator --tag REGISTRY/lockstep-operator:VERSION --push) and name it (lockstep deploy CLUSTER --image)"
            )
    return ""


async def operator_wait(cluster: Cluster, namespace: str, deployment: Object) -> Wait:
    """Return what keeps the operator's newest pods from being made or from running, as far as it can be seen."""
    conditions = deployment.get("status", {}).get("conditions") or []
    refused = next((c for c in conditions if c["type"] == "ReplicaFailure" and c["status"] == "True"), None)
    if refused is not None:
        why = explained(str(refused.get("message", refused.get("reason", ""))), namespace)
        return Wait(f"its pods can't be made: {why}", refused["type"])
    waits = (await why_pods_wait(cluster, namespace, await _pods(cluster, namespace), OF_THE_OPERATOR)).values()
    return max(waits, key=lambda wait: bool(wait.lasting), default=Wait())


async def _unready(cluster: Cluster, namespace: str) -> str:
    """Return what a probe of the operator's newest pods was answered, or how far a pod is; '' where neither is to be seen."""
    unhealthy = (await list_kind(cluster, "Event", namespace, {"fieldSelector": "type=Warning,reason=Unhealthy"})).items
    for pod in await _pods(cluster, namespace):
        own = [str(item.get("message")) for item in sorted(unhealthy, key=event_time) if item["involvedObject"].get("uid") == uid_of(pod)]
        if own:
            return f"pod {pod['metadata']['name']}: {own[-1]}"
        state = condition(pod.get("status") or {}, "Ready")
        if state.get("status") == "False":
            return f"pod {pod['metadata']['name']}: {state.get('message', '')} ({start_phase(pod)})"
    return ""


async def _pods(cluster: Cluster, namespace: str) -> list[Object]:
    """Return the operator's newest pods, which are of one template; none where they may not be seen."""
    listing = await list_kind(cluster, "Pod", namespace, {"labelSelector": "app.kubernetes.io/component=operator"})
    pods = sorted(listing.items, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    hashes = [str((pod["metadata"].get("labels") or {}).get(HASH_LABEL, "")) for pod in pods]
    return [pod for pod, value in zip(pods, hashes, strict=True) if value == hashes[-1]]
