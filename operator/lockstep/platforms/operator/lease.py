"""One replica leads: it holds Lease lockstep-operator, and writes only while it knows that nobody else can hold it.

Not the client library's election (kubernetes 37.0.2): it can't create its lock, its calls have no time limit, it raises out of `run`
with the leading task going on, writes local time as UTC, and never says until when the lease is held, which fencing needs.

A holder counts the lease as its own for RENEW_SECONDS from the moment it *asked*; the others wait LEASE_SECONDS from the moment they
*saw* the last change. No clock of one machine is ever compared with another's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lockstep.api.errors import Failed
from lockstep.api.names import ANNOTATION_LEADER, ANNOTATION_TROUBLE, APP, LABEL_NAME, OPERATOR_NAME
from lockstep.api.objects import Object
from lockstep.kube.clock import boot_seconds
from lockstep.kube.cluster import CONFLICT, MERGE, NOT_FOUND, ApiError, Cluster
from lockstep.kube.kinds import path_of, type_meta
from lockstep.plan.times import timestamp

LEASE_SECONDS = 15
SECONDS_MAX = 4 * LEASE_SECONDS
"""Longest duration of a Lease that another version or a person wrote, whatever it says: nobody would lead for years."""
RENEW_SECONDS = 10.0
"""Least time that is left between the holder's last write and another's first: LEASE_SECONDS less this."""
RETRY_SECONDS = 2.0
CALL_SECONDS = 4.0
"""Timeout of one request: two may fail before a renewal is too late."""
TRANSITIONS_MAX = 2**31 - 1
"""Largest number that the API server takes. Somebody may have written it, and one more would be refused for ever."""
NOBODY = "nobody"
"""Holds a Lease that was made again, until its time is over."""
log = logging.getLogger(__name__)


class LeaseLost(Failed):
    """This replica doesn't lead, or can't know any more that it does."""


@dataclass(frozen=True)
class LeaseState:
    """Content of the Lease, and since when (this machine's clock)."""

    version: str
    holder: str
    address: str
    seconds: int
    transitions: int
    since: float


class Lease:
    """This replica's side of the election. `identity` is its pod's name: what a pod's earlier process held is its own. `lack`: the right
    that it lacks, and since when (Unix time): whoever looks at jobs reads of it in the Lease.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        identity: str,
        address: str = "",
        clock: Callable[[], float] = boot_seconds,
        lack: Callable[[], tuple[float, str] | None] = lambda: None,
    ):
        self._cluster = cluster
        self._namespace = namespace
        self._path = path_of("Lease", namespace, OPERATOR_NAME)
        self._identity = identity
        self._address = address
        self._clock = clock
        self._seen: LeaseState | None = None
        self._held_until: float | None = None
        self._is_released = False
        self._trouble = ""
        self._lack = lack

    @property
    def is_held(self) -> bool:
        return self._left() > 0

    def _left(self) -> float:
        """Seconds for which it is held."""
        return 0.0 if self._held_until is None or self._is_released else max(0.0, self._held_until - self._clock())

    def check(self) -> None:
        """Check the lease before every write. Raises LeaseLost."""
        if not self.is_held:
            raise LeaseLost(f"{self._identity} doesn't hold the lease (any more), so it writes nothing")

    @property
    def leader(self) -> str | None:
        """The address of another replica that leads; "" when it has none; None when nobody is known to lead."""
        state = self._seen
        return state.address if state is not None and state.holder not in ("", self._identity) and not self._is_over(state) else None

    async def acquire(self) -> None:
        """Returns when this replica leads; goes on through every trouble until then."""
        while True:
            if await self._tried(self._try):
                log.info("%s leads", self._identity)
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def keep(self) -> None:
        """Renew it for ever. Raises LeaseLost as soon as it isn't held any more."""
        while True:
            await asyncio.sleep(min(RETRY_SECONDS, self._left()))
            self.check()
            await self._tried(self._renew)
            self.check()

    async def release(self) -> None:
        """Let another replica lead at once. From here on this one doesn't, whatever a renewal on its way still does."""
        if self.is_held:
            self._is_released = True
            await self._tried(self._release)

    async def _release(self) -> bool:
        spec = {"holderIdentity": "", "leaseDurationSeconds": 1}
        if await self._write(spec, ""):
            return True
        await self._look()  # a renewal was faster
        return self._seen is not None and self._seen.holder == self._identity and await self._write(spec, "")

    async def _tried(self, call: Callable[[], Any]) -> bool:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                done = bool(await call())
        except (ApiError, OSError) as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                log.warning("Lease %s: %s", OPERATOR_NAME, trouble)
            self._trouble = trouble
            return False
        self._trouble = ""
        return done

    async def _try(self) -> bool:
        await self._look()
        if self._seen is None:  # another replica makes it at this moment
            return False
        if self._seen.holder not in ("", self._identity) and not self._is_over(self._seen):
            return False
        return await self._take(self._seen)

    async def _take(self, state: LeaseState) -> bool:
        start, now = self._clock(), _micro_time()
        spec = {
            **self._spec(now),
            "acquireTime": now,
            "leaseTransitions": min(state.transitions + (state.holder != self._identity), TRANSITIONS_MAX),
        }
        if not await self._write(spec, self._address):
            return False
        self._held_until = start + RENEW_SECONDS
        return True

    async def _renew(self) -> bool:
        start = self._clock()
        if await self._write(self._spec(_micro_time()), self._address):
            self._held_until = start + RENEW_SECONDS
            return True
        await self._look()  # an earlier renewal whose reply was lost, or another holder
        if self._seen is not None and self._seen.holder != self._identity:
            self._held_until = None
        return False

    def _spec(self, now: str) -> Object:
        return {"holderIdentity": self._identity, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": now}

    async def _write(self, spec: Object, address: str) -> bool:
        """False: somebody else wrote since it was looked at."""
        assert self._seen is not None  # noqa: S101 (nothing is written that was not read)
        lack = self._lack()
        trouble = None if lack is None else f"{timestamp(lack[0])} {lack[1]}"
        annotations = {ANNOTATION_LEADER: address, ANNOTATION_TROUBLE: trouble}
        metadata = {"resourceVersion": self._seen.version, "annotations": annotations}
        try:
            self._take_in(await self._cluster.request("PATCH", self._path, {"metadata": metadata, "spec": spec}, content_type=MERGE))
        except ApiError as error:
            if error.status == CONFLICT:
                return False
            if error.status == NOT_FOUND and self.is_held:
                return await self._make(spec, address)
            raise
        return True

    async def _look(self) -> None:
        try:
            self._take_in(await self._cluster.request("GET", self._path))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            await self._make({"holderIdentity": NOBODY, "leaseDurationSeconds": LEASE_SECONDS}, "")

    async def _make(self, spec: Object, address: str) -> bool:
        """Somebody deleted it. The holder makes its own again; anybody else makes one that nobody holds for its first LEASE_SECONDS, since
        the holder goes on with its writes for RENEW_SECONDS. False: another replica was faster.
        """
        metadata = {
            "name": OPERATOR_NAME, "namespace": self._namespace, "labels": {LABEL_NAME: APP}, "annotations": {ANNOTATION_LEADER: address},
        }  # fmt: skip
        lease = {**type_meta("Lease"), "metadata": metadata, "spec": spec}
        try:
            self._take_in(await self._cluster.create(lease))
        except ApiError as error:
            if error.status == CONFLICT:
                return False
            raise
        log.warning("Lease %s was not there: it is made again", OPERATOR_NAME)
        return True

    def _take_in(self, item: Object) -> None:
        metadata, spec = item["metadata"], item.get("spec") or {}
        if self._seen is None or self._seen.version != metadata["resourceVersion"]:
            self._seen = LeaseState(
                version=metadata["resourceVersion"],
                holder=spec.get("holderIdentity") or "",
                address=(metadata.get("annotations") or {}).get(ANNOTATION_LEADER, ""),
                seconds=min(int(spec.get("leaseDurationSeconds") or 0), SECONDS_MAX),
                transitions=int(spec.get("leaseTransitions") or 0),
                since=self._clock(),
            )

    def _is_over(self, state: LeaseState) -> bool:
        return self._clock() - state.since > state.seconds


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
