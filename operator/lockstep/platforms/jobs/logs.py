"""The log of a job: live from its pods, whole from its volume, or the last lines that are kept when there is neither."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing

from lockstep.api.errors import Failed
from lockstep.api.names import CONTAINER, log_name, pod_name
from lockstep.api.objects import Object, is_run
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import NotRunning, looks_again
from lockstep.plan.pages.logs import LogSelection, of_rank, request_of
from lockstep.platforms.files.reader import beside
from lockstep.platforms.files.results import run_folder
from lockstep.platforms.jobs.keeper import exit_code
from lockstep.platforms.jobs.runs import folder_lines

RETRY_SECONDS = 0.5
SILENT_SECONDS = 30.0
"""Seconds without a line after which a log that is followed is asked for anew: a firewall may have forgotten the connection, and the job
have ended.
"""
READER_SECONDS = 600
"""Lifetime of a pod that shows a job's log."""
STAMP = re.compile(r"^\d{4}-\d{2}-\d{2}T")
"""Beginning of every line of a container's log that is read with timestamps. The kubelet's own complaints (the log file isn't
there yet, the container is gone) come in the same stream without one."""
REFUSED = (401, 403)
UNHEARD = re.compile(
    r"^\[lockstep\] (the operator did not take the report \(.*|waiting for the coordinator on node 0.*|nobody hears this node.*)"
)
"""Lines in which an agent or the coordinator says whom it can't reach."""
UNHEARD_LINES, UNHEARD_PODS = 1000, 2
Over = Callable[[], Awaitable[bool]]


async def follow(cluster: Cluster, namespace: str, job: str, selection: LogSelection, over: Over) -> AsyncIterator[str]:
    """Yield lines of the node's pod through restarts of its container and new pods, until `over()` says that the job has ended.

    A pod that isn't there yet or isn't running yet is waited for. Raises Failed without the right to read logs.
    """
    reader = _Reader(cluster, namespace, pod_name(job, selection.node), selection)
    await reader.was_restarted()  # counted from here on
    while True:
        async for line in reader.read({"follow": "true"}):
            yield line
        has_ended = await over()
        if not has_ended:
            await asyncio.sleep(RETRY_SECONDS)
        if (restarted := await reader.was_restarted()) or (has_ended and reader.broke_off):
            async for line in reader.read({"previous": "true"} if restarted else {}):
                yield line
        if has_ended:
            return


async def lines(cluster: Cluster, job: Object, selection: LogSelection, say: Callable[[str], None]) -> AsyncGenerator[str, None]:
    """Yield the lines that exist now: of the pod, of the last lines that were kept, or of the volume. `say` gets what else a person should
    know.

    Use `aclosing`: whoever stops in the middle (`| head`) leaves no reader behind. Raises Failed without the rights that it takes, or when
    there is nothing to be had.
    """
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    pod = await cluster.get("Pod", namespace, pod_name(name, selection.node))
    lacks = _lacks_earlier(pod, job.get("status", {})) or (is_run(job) and restarts_of(pod) > 0) if pod is not None else True
    if not lacks and selection.attempt is None:
        printed = False
        async for line in _of_pod(cluster, namespace, pod_name(name, selection.node), selection):
            printed = True
            yield line
        if printed or selection.tail == 0:
            return
        pod = await cluster.get("Pod", namespace, pod_name(name, selection.node))
        if pod is not None and not _is_going(pod):
            return
        pod = None  # it went away between the two requests, its log with it, as pods of a job do that has just ended
    last = await last_lines(cluster, namespace, name) if pod is None and selection.node == 0 else None
    any_will_do = selection.rank is None and selection.attempt is None and selection.since_seconds is None
    if last is not None and any_will_do and selection.tail is not None and selection.tail <= len(last):
        for line in last[len(last) - selection.tail :]:
            yield line
        return
    async with aclosing(_of_volume(cluster, job, selection, last, say)) as volume_lines:
        async for line in volume_lines:
            yield line


async def has_run_ended(cluster: Cluster, namespace: str, name: str) -> bool:
    """Return True if a run without operator has nothing left to do."""
    stateful_set = await cluster.get("StatefulSet", namespace, name)
    pod = await cluster.get("Pod", namespace, pod_name(name, 0))
    return not (stateful_set or {}).get("spec", {}).get("replicas") or exit_code(pod) is not None


async def _of_pod(cluster: Cluster, namespace: str, pod: str, selection: LogSelection) -> AsyncIterator[str]:
    reading = _Reader(cluster, namespace, pod, selection).read({})
    if selection.rank is None or selection.tail is None:
        async for line in reading:
            yield line
        return
    newest = deque([line async for line in reading], maxlen=selection.tail)  # the kubelet counts lines of all ranks
    for line in newest:
        yield line


def _is_going(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"] or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _lacks_earlier(pod: Object, status: Object) -> bool:
    """Return True if an attempt failed before the pod's container began, so that its log lacks that attempt."""
    state = trainer_of(pod).get("state", {})
    began = (state.get("running") or state.get("terminated") or {}).get("startedAt", "")
    return bool(began) and any(str(entry["time"]) < began for entry in status.get("restartHistory") or [])


async def _of_volume(
    cluster: Cluster, job: Object, selection: LogSelection, last: list[str] | None, say: Callable[[str], None]
) -> AsyncGenerator[str, None]:
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    none, why, began = True, _nothing_of(selection), time.monotonic()
    while True:
        try:
            async with (
                beside(cluster, namespace, name, selection.node, seconds=READER_SECONDS, say=say) as place,
                aclosing(
                    folder_lines(place, run_folder(name), uid=job["metadata"]["uid"], **request_of(selection, time.time()))
                ) as volume_lines,
            ):
                async for line in volume_lines:
                    none = False
                    yield line
            break
        except NotRunning as error:
            why = str(error)
            if not await looks_again(began):
                break
        except (Failed, OSError) as error:
            if not none:
                raise
            why = str(error)
            break
    if not none:
        return
    if last is None or selection.attempt is not None:
        raise Failed(f"job {name}: {why}")
    say(f"only the last lines of node 0 of job {name} are available: {why}")
    for line in deque((line for line in last if of_rank(line, selection.rank)), maxlen=selection.tail):
        yield line


def _nothing_of(selection: LogSelection) -> str:
    attempt = "" if selection.attempt is None else f" and attempt {selection.attempt}"
    if selection.rank is None:
        return f"its volume has no log of node {selection.node}{attempt}"
    return (
        f"its volume has no line of rank {selection.rank}{attempt}, as of a rank that prints nothing; --node {selection.node} shows all of"
        " its node"
    )


class _Reader:
    """One pod's log, each line once."""

    def __init__(self, cluster: Cluster, namespace: str, pod: str, selection: LogSelection) -> None:
        self._cluster, self._namespace, self._pod, self._selection = cluster, namespace, pod, selection
        self._last_stamp = ""
        self._restarts: int | None = None
        self.broke_off = False
        """True if the connection ended before the log did, when it was read last."""

    async def read(self, query: dict[str, str]) -> AsyncIterator[str]:
        self.broke_off = False
        try:
            stream = self._cluster.log(self._namespace, self._pod, CONTAINER, {"timestamps": "true", **self._bounds(), **query})
            while True:
                async with asyncio.timeout(SILENT_SECONDS if "follow" in query else None):
                    raw = await anext(stream, None)
                if raw is None:
                    return
                stamp, _, line = raw.partition(" ")
                if STAMP.match(stamp) and stamp > self._last_stamp:
                    self._last_stamp = stamp
                    if of_rank(line, self._selection.rank):
                        yield line
        except ApiError as error:
            if error.status in REFUSED:
                raise Failed(
                    f"the log of pod {self._pod} can't be read: {error.message}; it needs `get` on pods/log, which `view` has"
                ) from None
        except OSError as error:  # no container yet, silence, or the connection broke: the caller comes back
            self.broke_off = not isinstance(error, TimeoutError)

    def _bounds(self) -> dict[str, str]:
        if self._last_stamp:
            return {"sinceTime": f"{self._last_stamp[:19]}Z"}
        tail = {} if self._selection.tail is None or self._selection.rank is not None else {"tailLines": str(self._selection.tail)}
        return tail | ({} if self._selection.since_seconds is None else {"sinceSeconds": str(self._selection.since_seconds)})

    async def was_restarted(self) -> bool:
        """Return True if another container of the pod runs than before: the last lines of the one before it are still to be read."""
        try:
            pod = await self._cluster.get("Pod", self._namespace, self._pod)
        except (ApiError, OSError):  # seen at the next look: `over` says what is the matter
            return False
        before, self._restarts = self._restarts, restarts_of(pod or {})
        return before is not None and self._restarts > before


async def unheard_lines(cluster: Cluster, namespace: str, pods: Sequence[Object]) -> list[str]:
    """Last line of each of the first pods about whom it can't reach; none of a pod without such a line, or whose log may not be read."""
    messages = []
    for pod in pods[:UNHEARD_PODS]:
        name, last = str(pod["metadata"]["name"]), ""
        try:
            async for line in cluster.log(namespace, name, CONTAINER, {"tailLines": str(UNHEARD_LINES)}):
                last = match[1] if (match := UNHEARD.match(line)) else last
        except (ApiError, OSError):
            continue
        if last:
            messages.append(f"{name}: {last}")
    return messages


def trainer_of(pod: Object) -> Object:
    """Status of the pod's container that has the ranks; {} while there is none."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((status for status in statuses if status["name"] == CONTAINER), {})


def restarts_of(pod: Object) -> int:
    return int(trainer_of(pod).get("restartCount", 0))


async def last_lines(cluster: Cluster, namespace: str, job: str) -> list[str] | None:
    """Lines that are kept in ConfigMap x-log after the end; None when there are none."""
    config_map = await cluster.get("ConfigMap", namespace, log_name(job))
    data = (config_map or {}).get("data")
    return None if data is None else [line for key in sorted(data) for line in data[key].splitlines()]
