"""Access to a job's files: in its own pods while they run, else in a short-lived pod that mounts its claims.

    async with beside(cluster, namespace, job, node=0, say=print) as place:
        data = await output_of(place, ["cat", "/workspace/runs/demo/logs/train_log.jsonl"])

The pod is the user's own: it needs the right to create, read and delete pods and to run programs in them, which the built-in role `edit`
has. It is removed at the end, on Ctrl-C too. One that was left behind (SIGKILL, a laptop that slept) goes within two minutes (`expiring`);
for who may not make Jobs it ends by its own deadline, and the next reader sweeps it up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from secrets import token_hex
from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import CONTAINER, LABEL_JOB, pod_name
from lockstep.api.objects import Object, claim_names, is_running
from lockstep.api.sccs import scc_refusal
from lockstep.kube.cluster import CONFLICT, FORBIDDEN, ApiError, Cluster, tolerated
from lockstep.kube.exec import PodPlace
from lockstep.kube.expiry import REMOVAL_SECONDS, expiring
from lockstep.plan.observed import is_terminating
from lockstep.plan.render.readerpod import CONTAINER as READER_CONTAINER
from lockstep.plan.render.readerpod import (
    LABEL_READER_OF,
    is_shared,
    makes_volumes,
    missing_claim,
    mounted_claims,
    pod_claims_of,
    reader_pod,
    with_secrets,
)
from lockstep.plan.waiting.containers import OF_A_HELPER
from lockstep.platforms.clusters.listings import list_kind
from lockstep.platforms.clusters.waits import why_pods_wait
from lockstep.programs import meanwhile

if TYPE_CHECKING:
    from lockstep.plan.render.resolved import Resolved

LIFETIME_SECONDS = 3600
START_SECONDS = 300.0
"""Seconds for the start of the pod. It may have to pull the job's image."""
TROUBLE_SECONDS = 20.0
"""Seconds for which the pod may be kept from starting before the reader gives up: schedulers and kubelets try again."""
POLL_SECONDS = 0.25
QUIET_SECONDS = 3.0
Say = Callable[[str], None]


class NoReader(Failed):
    """The pod that would show a job's files can't be made or doesn't start. The message says why and what to do."""


async def stateful_set_of(cluster: Cluster, namespace: str, job: str) -> Object:
    """StatefulSet of the job: its template has the claims, image and user of the job's pods. Raises ConfigError when the job has never
    started.
    """
    stateful_set = await cluster.get("StatefulSet", namespace, job)
    if stateful_set is None:
        raise ConfigError(
            f"job {job} in namespace {namespace} has never started, so it has no files yet: lockstep why {job} -n {namespace}; "
            f"to copy files there first: lockstep cp -f FILE SRC {job}:"
        )
    return stateful_set


async def stateful_set_before_start(cluster: Cluster, job: Resolved) -> Object:
    """The StatefulSet that the job would have. The claims that its pods will share, or each will have, are created where they are
    missing.
    """
    from lockstep.plan.render.objects import render
    from lockstep.plan.render.resolve import resolve
    from lockstep.platforms.clusters.facts import with_image

    profile = await with_image(cluster, job.job, job.profile, job.namespace)
    job = resolve(job.job, profile, replace(job.platform, image=None))
    (stateful_set,) = [item for item in render(job) if item["kind"] == "StatefulSet"]
    templates = {item["metadata"]["name"]: item for item in stateful_set["spec"].get("volumeClaimTemplates") or []}
    own = [
        {**templates[volume], "metadata": {**templates[volume]["metadata"], "name": claim, "namespace": job.namespace}}
        for node in range(job.nodes)
        for volume, claim in pod_claims_of(stateful_set, node).items()
    ]
    await create_claims(cluster, job, own)
    return stateful_set


async def create_claims(cluster: Cluster, job: Resolved, own: Sequence[Object] = ()) -> None:
    """Create the claims that all pods of the job share, and those of `own`, where they are missing."""
    from lockstep.plan.render.objects import claims

    for claim in (*claims(job), *own):
        with tolerated(CONFLICT):
            await cluster.create(claim)


async def running_pods(cluster: Cluster, namespace: str, job: str) -> dict[int, PodPlace]:
    """Map of node to its pod, of the pods that run."""
    pods = (await cluster.list("Pod", namespace, {"labelSelector": f"{LABEL_JOB}={job}"}))["items"]
    names = {pod["metadata"]["name"] for pod in pods if is_running(pod) and not is_terminating(pod)}
    return {node: PodPlace(cluster, namespace, name, CONTAINER) for name in names if (node := _node(job, name)) is not None}


def _node(job: str, pod: str) -> int | None:
    number = pod.removeprefix(f"{job}-")
    return int(number) if number.isdecimal() and pod_name(job, int(number)) == pod else None


async def nodes_with_volumes(cluster: Cluster, namespace: str, job: str) -> list[int]:
    """Nodes that have volumes of their own; [0] where all pods share their volumes. Raises ConfigError."""
    stateful_set = await stateful_set_of(cluster, namespace, job)
    if is_shared(stateful_set):
        return [0]
    first = f"{next(iter(pod_claims_of(stateful_set, 0)))}-"
    claims = await list_kind(cluster, "PersistentVolumeClaim", namespace)
    if not claims.seen:
        return sorted(await running_pods(cluster, namespace, job))
    names = (str(claim["metadata"]["name"]) for claim in claims.items)
    return sorted(node for name in names if name.startswith(first) and (node := _node(job, name.removeprefix(first))) is not None)


async def place_roots(place: PodPlace, *, writing: bool) -> list[str]:
    """Paths where the container mounts claims. Raises NoReader when its pod is gone."""
    pod = await place.cluster.get("Pod", place.namespace, place.pod)
    if pod is None:
        raise NoReader(f"{place.name} has just gone: try again")
    return mounted_claims(pod, place.container, writing=writing)


@asynccontextmanager
async def beside(
    cluster: Cluster,
    namespace: str,
    job: str,
    node: int = 0,
    *,
    seconds: int = LIFETIME_SECONDS,
    secrets: bool = False,
    say: Say = lambda line: None,
) -> AsyncIterator[PodPlace]:
    """Container that sees the files of node `node` of the job: of its own pod, where that runs, else of a reader.

    Where all pods share their volumes, any that runs will do. `say` hears what is waited for.

    Raises:
        ConfigError: the job has never started.
        NoReader: the reader can't be made or doesn't start.
    """
    stateful_set = await stateful_set_of(cluster, namespace, job)
    running = await running_pods(cluster, namespace, job)
    own = running.get(node) or (next(iter(running.values()), None) if is_shared(stateful_set) else None)
    if own is not None:
        yield own
        return
    async with reader(cluster, stateful_set, node, seconds=seconds, secrets=secrets, say=say) as place:
        yield place


@asynccontextmanager
async def reader(
    cluster: Cluster,
    stateful_set: Object,
    node: int = 0,
    *,
    seconds: int = LIFETIME_SECONDS,
    resources: Object | None = None,
    secrets: bool = False,
    say: Say = lambda line: None,
) -> AsyncIterator[PodPlace]:
    """Container of a short-lived pod with the claims of node `node`. The pod is removed at the end, whatever happens. `secrets`: also with
    the job's variables from Secrets and ConfigMaps. Raises NoReader.
    """
    pod = reader_pod(stateful_set, node, token_hex(3), seconds, resources)
    if secrets:
        pod = with_secrets(pod, stateful_set)
    place = PodPlace(cluster, pod["metadata"]["namespace"], pod["metadata"]["name"], READER_CONTAINER)
    await asyncio.gather(
        _check_claims(cluster, stateful_set, node, pod), _sweep(cluster, place.namespace, stateful_set["metadata"]["name"])
    )
    metadata = pod["metadata"]
    image = pod["spec"]["containers"][0]["image"]
    async with expiring(cluster, place.namespace, place.pod, image, metadata["ownerReferences"]) as owner:
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        try:
            await _create(cluster, pod)
            say(f"starting pod {place.pod} to access the files of job {stateful_set['metadata']['name']}; it is removed afterwards")
            async with _changes(place) as changed:
                await _until_running(place, say, changed)
            yield place
        finally:
            await _remove(place)


async def _check_claims(cluster: Cluster, stateful_set: Object, node: int, pod: Object) -> None:
    namespace = pod["metadata"]["namespace"]
    try:
        names = claim_names(pod)
        claims = dict(
            zip(names, await asyncio.gather(*(cluster.get("PersistentVolumeClaim", namespace, name) for name in names)), strict=True)
        )
    except ApiError as error:
        if error.status != FORBIDDEN:
            raise
        return  # whoever may not look at claims may still mount them
    existing = {name: claim for name, claim in claims.items() if claim is not None}
    missing = missing_claim(pod, existing, {} if makes_volumes(stateful_set) else pod_claims_of(stateful_set, node))
    if missing is not None:
        raise NoReader(f"{missing}; look with: kubectl get pvc -n {namespace}")


async def _create(cluster: Cluster, pod: Object) -> None:
    namespace = pod["metadata"]["namespace"]
    try:
        await cluster.create(pod)
    except ApiError as error:
        if error.status != FORBIDDEN:
            raise
        raise NoReader(_refused(error.message, namespace)) from None


def _refused(message: str, namespace: str) -> str:
    what = f"a pod that shows the job's files was refused in namespace {namespace}"
    if "quota" in message:
        return f"{what}: {message}; free some of the quota, or wait until the job's own pods run"
    by_scc = scc_refusal(message, namespace)
    if by_scc or "PodSecurity" in message:
        return f"{what}: {': '.join(by_scc or (message,))}"
    return f"{what}: {message}; it needs the rights to create and delete pods and to create pods/exec, which the role `edit` has"


@asynccontextmanager
async def _changes(place: PodPlace) -> AsyncIterator[asyncio.Event]:
    """Event that is set whenever the pod changes; never, if your account may not watch pods."""
    changed = asyncio.Event()

    async def hear() -> None:
        with suppress(ApiError, OSError):
            async for _ in place.cluster.watch("Pod", place.namespace, {"fieldSelector": f"metadata.name={place.pod}"}):
                changed.set()

    async with meanwhile(hear()):
        yield changed


async def _until_running(place: PodPlace, say: Say, changed: asyncio.Event) -> None:
    begun, troubled, reported = time.monotonic(), None, ""
    while True:
        pod = await place.cluster.get("Pod", place.namespace, place.pod)
        if pod is None:
            raise NoReader(f"pod {place.pod} was deleted while it started: try again")
        if is_running(pod):
            return
        now = time.monotonic()
        whys = await why_pods_wait(place.cluster, place.namespace, [pod], OF_A_HELPER) if now - begun > QUIET_SECONDS else {}
        why = whys[place.pod].message if whys else None
        troubled = None if why is None else troubled or now
        late = now - begun > START_SECONDS or pod["status"].get("phase") in ("Failed", "Succeeded")
        if late or (troubled is not None and now - troubled > TROUBLE_SECONDS):
            raise NoReader(f"pod {place.pod}, which would show the job's files, does not start: {why or 'the cluster gives no reason'}")
        if (quiet := now - begun > QUIET_SECONDS) and (line := f"waiting for pod {place.pod}: {why or 'it starts'}") != reported:
            say(line)
            reported = line
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0 if quiet else POLL_SECONDS):
                await changed.wait()
        changed.clear()


async def _sweep(cluster: Cluster, namespace: str, job: str) -> None:
    """Delete readers that ended by their own deadline: nothing else removes them."""
    with suppress(ApiError):
        for pod in (await cluster.list("Pod", namespace, {"labelSelector": f"{LABEL_READER_OF}={job}"}))["items"]:
            if pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
                await cluster.delete("Pod", namespace, pod["metadata"]["name"], pod["metadata"]["uid"])


async def _remove(place: PodPlace) -> None:
    with suppress(ApiError, TimeoutError):
        async with asyncio.timeout(REMOVAL_SECONDS):
            await place.cluster.delete("Pod", place.namespace, place.pod)
