"""Does what a plan says, and nothing that isn't in it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from lockstep.api.names import API_VERSION, OPERATOR_NAME
from lockstep.api.objects import Object
from lockstep.kube.cluster import CONFLICT, FORBIDDEN, ApiError, Cluster, tolerated
from lockstep.plan.diff import changes
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, owner_uid
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.events import WARNING, JobEvent, SentEvents, worth_sending
from lockstep.plan.reconcile.reconcile import Plan
from lockstep.plan.reconcile.status import smaller_statuses
from lockstep.plan.reconcile.writes import is_of_namesake, is_other_run, makes_pods, name_taken
from lockstep.plan.times import timestamp
from lockstep.platforms.operator.memory.queue import Refusals

log = logging.getLogger("lockstep.operator")
EVENTS_SECONDS = 15.0
CREATES_AT_ONCE = 10
"""Writes at a time, of all jobs together: more of them are no faster, and each has a connection, which keeps 100 kB and more. A start has
seven, and its claims.
"""
MESSAGE_CHARACTERS = 1024
"""Characters of an API server's message that are repeated: a policy's may be long."""


class Executor:
    """Writes plans to one cluster. `written` gets what the API server answers, so that the next look at the job knows it; `read`, what was
    changed by others.
    """

    def __init__(
        self, cluster: Cluster, written: Callable[[str, Object], None], read: Callable[[str, Object], None] = lambda kind, item: None
    ) -> None:
        self._cluster = cluster
        self._written = written
        self._read = read
        self._sent: dict[str, SentEvents] = {}
        self._creates = asyncio.Semaphore(CREATES_AT_ONCE)
        self._overruled = Refusals()
        """Refusals of writes, by the job's uid and the object."""

    async def write_objects(self, observed: Observed, plan: Plan) -> Notice | None:
        """Delete, create and apply; what stood in the way, if anything did. Raises ApiError for what may pass by itself."""
        try:
            for item in plan.delete:
                await self._cluster.delete(item["kind"], observed.namespace, item["metadata"]["name"], item["metadata"]["uid"])
                _record(observed, "deleted", item)
            for pod in plan.force_delete:
                metadata = pod["metadata"]
                await self._cluster.delete("Pod", observed.namespace, metadata["name"], metadata["uid"], grace_seconds=0)
                _record(observed, "deleted by force", pod)
            obstacle = await self._create_all(observed, plan)
            for item in plan.apply:
                if obstacle is None or _lets_go(item):
                    await self._apply(observed, item)
        except ApiError as error:
            if not error.is_refusal:
                raise
            return _refused(error)
        return obstacle

    async def _apply(self, observed: Observed, item: Object) -> None:
        """Objects that an admission policy changes back at once. They are sent again ever less often: each time is a change that brings the
        next look at the job.
        """
        kind, metadata = item["kind"], item["metadata"]
        wanted = {**item, "metadata": {key: value for key, value in metadata.items() if key not in ("uid", "resourceVersion")}}
        key = observed.uid, f"{kind} {metadata['name']}"
        if self._overruled.left(key, wanted) > 0:
            return
        reply = await self._applied(item)
        _record(observed, "changed", item)
        overruled = changes(wanted, reply)
        if not overruled:
            self._overruled.forget(key)
            return
        left = self._overruled.refused(key, wanted)
        where = f"{observed.namespace}/{observed.name}: {key[1]}"
        log.warning("%s: an admission policy changes %s back; it is sent again in %.0f s", where, overruled[0].path, left)

    async def _applied(self, item: Object, subresource: str = "") -> Object:
        """The object as it is then. Where it is newer than what was seen it is read, since its event may never come. Raises ApiError."""
        kind, metadata = item["kind"], item["metadata"]
        try:
            reply = await self._cluster.apply(item, subresource=subresource)
        except ApiError as error:
            if error.status == CONFLICT:
                by_name = {"fieldSelector": f"metadata.name={metadata['name']}"}  # (single jobs may not be read, but listed)
                for live in (await self._cluster.list(kind, metadata["namespace"], by_name))["items"]:
                    self._read(kind, live)
            raise
        self._written(kind, reply)
        return reply

    async def _create_all(self, observed: Observed, plan: Plan) -> Notice | None:
        """Create all at once, since each takes a round trip, and what makes pods last unless the plan says otherwise. Then it is taken back
        if something is in the way.
        """
        beside = plan.at_once and not plan.claims
        first = [item for item in plan.create if beside or not makes_pods(item)]
        creating = [*(self._create_claim(observed, claim) for claim in plan.claims), *(self._create(observed, item) for item in first)]
        done: list[Object | Notice | None] = []
        for result in await asyncio.gather(*map(self._in_turn, creating), return_exceptions=True):
            if isinstance(result, ApiError) and result.is_refusal:
                done.append(_refused(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                done.append(result)
        obstacle = next((result for result in done if isinstance(result, Notice)), None)
        stateful_sets = [result for result in done if isinstance(result, dict) and makes_pods(result)]
        if obstacle is not None:
            for item in stateful_sets or plan.half_made:
                await self._cluster.delete("StatefulSet", observed.namespace, item["metadata"]["name"], item["metadata"]["uid"])
                _record(observed, "took back", item)
            return obstacle
        for item in plan.create:
            if item not in first and isinstance(refusal := await self._create(observed, item), Notice):
                return refusal
        return None

    async def _in_turn(self, creating: Coroutine[Any, Any, Object | Notice | None]) -> Object | Notice | None:
        async with self._creates:
            return await creating

    async def _create_claim(self, observed: Observed, claim: Object) -> None:
        with tolerated(CONFLICT):
            self._written(claim["kind"], await self._cluster.create(claim))
            _record(observed, "created", claim)

    async def _create(self, observed: Observed, item: Object) -> Object | Notice:
        """Return the object as it is there now, or why it can't be created."""
        try:
            live = await self._cluster.create(item)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            if item["kind"] == "Secret":
                self._written("Secret", _unread(item))
                return item
            existing = await self._cluster.get(item["kind"], observed.namespace, item["metadata"]["name"])
            if existing is None:
                raise  # gone meanwhile, or a conflict over something else, such as a quota's count: the same write is due again
            if owner_uid(existing) != observed.uid:
                return _who_has_it(observed, item, existing)
            if is_other_run(item, existing):
                return _other_run(observed, item)
            live = await self._restored(item, existing)
        else:
            _record(observed, "created", item)
        self._written(item["kind"], live)
        return live

    async def _restored(self, item: Object, existing: Object) -> Object:
        """This job's own that was not seen: written a moment ago, or its labels were taken away."""
        if not changes({"metadata": {"labels": item["metadata"]["labels"]}}, existing):
            return existing
        metadata = {**item["metadata"], "uid": existing["metadata"]["uid"], "resourceVersion": existing["metadata"]["resourceVersion"]}
        return await self._cluster.apply({**item, "metadata": metadata})

    async def write_status(self, observed: Observed, status: Object) -> None:
        """Only over the very job that was seen: what is concluded from an older one is never written. Raises ApiError."""
        version = observed.job["metadata"]["resourceVersion"]
        metadata = {"name": observed.name, "namespace": observed.namespace, "uid": observed.uid, "resourceVersion": version}
        body = {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": metadata, "status": status}
        await self._applied(body, subresource="status")

    async def write_less(self, observed: Observed, status: Object, refusal: ApiError) -> None:
        """Write as much of a refused status as the API server takes. Raises ApiError."""
        for smaller in smaller_statuses(status, refusal.message):
            try:
                return await self.write_status(observed, smaller)
            except ApiError as error:
                if not error.is_refusal:
                    raise

    def forget(self, uids: set[str]) -> None:
        """Remember the events of these jobs only."""
        self._sent = {uid: sent for uid, sent in self._sent.items() if uid in uids}
        self._overruled.keep(uids)

    async def send_events(self, observed: Observed, events: tuple[JobEvent, ...], now: float) -> None:
        """Send events before the status that they lead to: a process that is killed in between sends them again, under the same names. No
        repetitions, not too many.

        An event that is refused is not retried: the same stands in status, which must not wait for events.
        """
        if not events:
            return
        self._sent[observed.uid], events = worth_sending(self._sent.get(observed.uid, SentEvents()), events, now)
        try:
            async with asyncio.timeout(EVENTS_SECONDS):
                for event in events:
                    log.info("%s/%s: %s: %s", observed.namespace, observed.name, event.reason, event.message)
                    await self._send_event(observed, event, timestamp(now))
        except TimeoutError:
            log.warning("%s/%s: the API server takes too long to take events", observed.namespace, observed.name)

    async def _send_event(self, observed: Observed, event: JobEvent, now: str) -> None:
        try:
            await self._cluster.create(_event(observed, event, now))
        except ApiError as error:
            if error.status != CONFLICT:
                log.warning("%s/%s: event %s: %s", observed.namespace, observed.name, event.reason, error)


def _record(observed: Observed, act: str, item: Object) -> None:
    """One line for each thing done with the operator's rights, so that its log can be held against the API server's audit log."""
    replicas = f", {item['spec']['replicas']} replicas" if item["kind"] == "StatefulSet" and act in ("created", "changed") else ""
    name = item["metadata"]["name"]
    log.info("%s/%s (uid %s): %s %s %s%s", observed.namespace, observed.name, observed.uid, act, item["kind"], name, replicas)


def _event(observed: Observed, event: JobEvent, now: str) -> Object:
    """Return the Event. Its name says from which version of the job it follows, and so is the same however often that is concluded."""
    version = observed.job["metadata"]["resourceVersion"]
    digest = hashlib.sha256("\0".join((observed.uid, version, event.reason, event.message)).encode()).hexdigest()[:16]
    about = {"apiVersion": API_VERSION, "kind": "TrainingJob", "name": observed.name, "namespace": observed.namespace, "uid": observed.uid}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{observed.name}.{digest}", "namespace": observed.namespace},
        "involvedObject": about,
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": "lockstep-operator"},
    }


def _unread(secret: Object) -> Object:
    """A job's Secret that is there already. Its name says whose it is, so that the operator needs no right to read Secrets."""
    return {**secret, "metadata": {**secret["metadata"], "uid": "", "resourceVersion": "1"}}


def _refused(error: ApiError) -> Notice:
    text = f"the API server refused an object of the job: {error.message[:MESSAGE_CHARACTERS]}"
    lacks_right = error.status == FORBIDDEN and f":{OPERATOR_NAME}" in error.message and " cannot " in error.message
    return Notice(
        Reason.WRITE_REFUSED, text + (": the operator has lost this right, `lockstep deploy CLUSTER` gives it again" if lacks_right else "")
    )


def status_refused(error: ApiError) -> JobEvent:
    """For a job whose status can't be written."""
    text = f"the API server refused the job's status, so that it lacks words, or is old: {error.message[:MESSAGE_CHARACTERS]}"
    advice = ": the job leaves no room for it, make its spec and its annotations smaller" if error.is_too_large else ""
    return JobEvent(WARNING, "StatusRefused", text + advice)


def _lets_go(item: Object) -> bool:
    """A quota that has no room for the job's last lines is no reason to keep its GPUs."""
    return bool(item["kind"] == "StatefulSet" and item["spec"].get("replicas") == 0)


def _other_run(observed: Observed, item: Object) -> Notice:
    name = item["metadata"]["name"]
    text = f"ConfigMap {name} in namespace {observed.namespace} exists already and holds another run than Lockstep would write"
    return Notice(Reason.NAME_TAKEN, f"{text}: somebody else made it; delete it (kubectl delete configmap {name} -n {observed.namespace})")


def _who_has_it(observed: Observed, item: Object, live: Object) -> Notice:
    if is_of_namesake(observed, live):
        return Notice(
            Reason.PREVIOUS_JOB_REMAINS, f"an earlier job of this name is still being removed: {item['kind']} {item['metadata']['name']}"
        )
    return name_taken(observed, item["kind"], live)
