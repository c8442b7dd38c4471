"""Pod in which text is generated: one of the job that is idle, or a short-lived one with the job's volumes, image and resources."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object, is_true
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import Place, program
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep.plan.render.readerpod import is_shared
from lockstep.platforms.files.reader import Say, reader, running_pods, stateful_set_of

MODULE = "lockstep_train.generate"
FEW = {"cpu", "memory"}


@asynccontextmanager
async def idle_or_own_pod(cluster: Cluster, namespace: str, job: str, gpus: int, say: Say) -> AsyncIterator[Place]:
    """Container for the generation. Beside ranks that train there would be neither memory nor time for it. Raises ConfigError, NoReader."""
    stateful_set = await stateful_set_of(cluster, namespace, job)
    running = await running_pods(cluster, namespace, job)
    if 0 in running and await _is_idle(cluster, namespace, job):
        yield running[0]
        return
    busy = running.get(0)
    if busy is not None and not is_shared(stateful_set):
        raise ConfigError(
            f"pod {busy.pod} trains, and a second pod may not be able to mount its volume: wait for the job's end, or fetch the adapter by lockstep adapter get {job}, and use --local"
        )
    async with reader(cluster, stateful_set, 0, resources=resources_of(stateful_set, gpus), say=say) as place:
        yield place


async def _is_idle(cluster: Cluster, namespace: str, job: str) -> bool:
    """Return True if nothing trains in its pods: the job is interactive, or has ended and is held."""
    try:
        training_job = await cluster.get("TrainingJob", namespace, job)
    except ApiError:  # (a cluster without the operator)
        return False
    status = (training_job or {}).get("status") or {}
    return training_job is not None and (
        training_job["spec"].get("type") == "Interactive" or is_true(status, "Failed") or is_true(status, "Complete")
    )


def resources_of(stateful_set: Object, gpus: int) -> Object:
    """Resources: CPU and memory as the job's pods have them, and `gpus` GPUs."""
    stated = stateful_set["spec"]["template"]["spec"]["containers"][0].get("resources") or {}
    devices = {GPU_RESOURCE: str(gpus)} if gpus else {}
    return {kind: {k: v for k, v in (stated.get(kind) or {}).items() if k in FEW} | devices for kind in ("requests", "limits")}


async def base_model(cluster: Cluster, namespace: str, job: str) -> str | None:
    """Folder of the base model, as the job names it; None: as the adapter does."""
    try:
        training_job = await cluster.get("TrainingJob", namespace, job)
    except ApiError:
        return None
    name = (((training_job or {}).get("spec") or {}).get("training") or {}).get("model", {}).get("name")
    return str(name) if name is not None and str(name).startswith("/") else None


async def write_on(cluster: Cluster, place: Place, arguments: Sequence[str], show: Callable[[bytes], Any]) -> int:
    """Run the trainer's program, and show what it writes as it comes. Raises ProgramFailed with its message."""
    async with program(cluster, place, ["python3", "-m", MODULE, *arguments], stdin=False, pings=True) as running:
        while text := await running.read():
            show(text)
        if running.code != 0:
            raise running.failure()
    return 0
