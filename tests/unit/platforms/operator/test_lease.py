"""The election: who leads, until when it may write, and what becomes of it when the API server is away."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.kube.cluster import ApiError
from lockstep.platforms.operator import lease as module
from lockstep.platforms.operator.lease import Lease, LeaseLost
from unit.virtual_time import VirtualClock

LEASE_SECONDS = 15
RENEW_SECONDS = 10.0


class Store:
    """One Lease, as the API server keeps it: a change of another version than the newest is a conflict."""

    def __init__(self) -> None:
        self.item: dict[str, Any] | None = {"metadata": {"name": "lockstep-operator", "resourceVersion": "1"}, "spec": {}}
        self.is_away = False
        self.loses_replies = False
        self._versions = itertools.count(2)

    async def request(self, method: str, path: str, body: Any = None, query: Any = None, content_type: str = "") -> dict[str, Any]:
        if self.is_away:
            raise OSError("away")
        if self.item is None:
            raise ApiError(404, "NotFound", "not found")
        if method == "PATCH":
            if body["metadata"]["resourceVersion"] != self.item["metadata"]["resourceVersion"]:
                raise ApiError(409, "Conflict", "the object has been modified")
            metadata = {**self.item["metadata"], **body["metadata"], "resourceVersion": str(next(self._versions))}
            self.item = {"metadata": metadata, "spec": {**self.item["spec"], **body["spec"]}}
            if self.loses_replies:
                raise TimeoutError("no reply")
        return self.item

    async def create(self, item: dict[str, Any]) -> dict[str, Any]:
        if self.is_away:
            raise OSError("away")
        if self.item is not None:
            raise ApiError(409, "AlreadyExists", "it is there")
        self.item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(next(self._versions))}}
        return self.item

    @property
    def holder(self) -> str:
        return str(self.item["spec"].get("holderIdentity", ""))


class World:
    """Two replicas and one clock that moves only when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.store = Store()
        self.events: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(module.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        for event in [event for event in self.events if event[0] <= self.now]:
            self.events.remove(event)
            event[1]()

    def lease(self, name: str) -> Lease:
        return Lease(self.store, "lockstep-system", name, f"{name}:8443", lambda: self.now)  # type: ignore[arg-type]

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.events.append((self.now + seconds, what))

    def away(self, value: bool) -> Callable[[], None]:
        return lambda: setattr(self.store, "is_away", value)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_the_first_leads_and_the_other_names_its_address(world: World) -> None:
    first, second = world.lease("a"), world.lease("b")
    await first.acquire()
    assert (first.is_held, first.leader) == (True, None)
    assert not await second._tried(second._try)
    assert (second.is_held, second.leader) == (False, "a:8443")
    with pytest.raises(LeaseLost, match="b doesn't hold the lease"):
        second.check()


async def test_a_holder_that_died_is_replaced_after_the_lease_s_time(world: World) -> None:
    first, second = world.lease("a"), world.lease("b")
    await first.acquire()
    began = world.now
    await second.acquire()
    assert LEASE_SECONDS < world.now - began <= LEASE_SECONDS + 4.0
    assert not first.is_held
    assert world.store.item["spec"]["leaseTransitions"] == 2


async def test_no_two_hold_it_at_any_moment_whenever_the_first_was_cut_off(world: World) -> None:
    """The second's first moment comes after the first's last, by a margin of LEASE_SECONDS less RENEW_SECONDS."""
    first, second = world.lease("a"), world.lease("b")
    await first.acquire()
    await second._tried(second._try)
    while not await second._tried(second._try):
        await module.asyncio.sleep(0.5)
        assert first.is_held == (world.now - 1000.0 < RENEW_SECONDS)
    assert world.now - (1000.0 + RENEW_SECONDS) >= LEASE_SECONDS - RENEW_SECONDS


async def test_a_holder_that_was_paused_writes_nothing_when_it_comes_back(world: World) -> None:
    first = world.lease("a")
    await first.acquire()
    world.now += 40
    with pytest.raises(LeaseLost):
        first.check()
    with pytest.raises(LeaseLost):
        await first.keep()
    assert world.store.item["metadata"]["resourceVersion"] == "2"  # nor does it take the lease again


async def test_an_api_server_that_is_away_for_a_moment_is_waited_for(world: World) -> None:
    first = world.lease("a")
    await first.acquire()
    world.after(3, world.away(True))
    world.after(8, world.away(False))
    world.after(60, lambda: setattr(world.store, "item", {"metadata": {"resourceVersion": "x"}, "spec": {"holderIdentity": "b"}}))
    with pytest.raises(LeaseLost):
        await first.keep()
    assert world.now >= 1060


async def test_an_api_server_that_stays_away_ends_the_leading_before_another_may_lead(world: World) -> None:
    first = world.lease("a")
    await first.acquire()
    world.after(3, world.away(True))
    with pytest.raises(LeaseLost):
        await first.keep()
    assert world.now <= 1000 + 2 + RENEW_SECONDS + 2.0


async def test_a_renewal_whose_reply_was_lost_is_noticed_as_its_own(world: World) -> None:
    first = world.lease("a")
    await first.acquire()
    world.after(1, lambda: setattr(world.store, "loses_replies", True))
    world.after(3, lambda: setattr(world.store, "loses_replies", False))
    world.after(30, world.away(True))
    with pytest.raises(LeaseLost):
        await first.keep()
    assert world.now > 1030


async def test_one_that_ends_lets_the_next_lead_at_once_and_a_pod_that_starts_again_holds_what_was_its_own(world: World) -> None:
    first, second, again = world.lease("a"), world.lease("b"), world.lease("b")
    await first.acquire()
    await first.release()
    assert not first.is_held
    await second.acquire()
    await again.acquire()
    assert world.now == 1000.0
    assert world.store.holder == "b"


async def test_a_release_holds_also_when_a_renewal_was_on_its_way(world: World) -> None:
    first = world.lease("a")
    await first.acquire()
    await world.store.request("PATCH", "", {"metadata": {"resourceVersion": "2"}, "spec": {}})  # the renewal, as the store sees it
    await first.release()
    assert (world.store.holder, first.is_held) == ("", False)


def test_a_call_that_hangs_is_given_up_long_before_the_lease_ends() -> None:
    class Hanging(Store):
        async def request(self, *_: Any, **__: Any) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

    clock = VirtualClock()
    lease = Lease(Hanging(), "lockstep-system", "a")  # type: ignore[arg-type]
    assert not clock.run(lease._tried(lease._try))
    assert clock.now == 1000.0 + 4.0  # two of them may fail before a renewal is too late


async def test_a_holder_that_is_cut_off_ends_at_the_very_moment_when_the_lease_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 3.0)
    lease = world.lease("a")
    await lease.acquire()
    world.store.is_away = True
    with pytest.raises(LeaseLost):
        await lease.keep()
    assert world.now - 1000.0 == RENEW_SECONDS


async def test_a_lease_that_was_deleted_is_made_again_by_its_holder_which_goes_on(world: World) -> None:
    first = world.lease("a")
    await first.acquire()
    world.after(4, lambda: setattr(world.store, "item", None))
    world.after(60, world.away(True))
    with pytest.raises(LeaseLost):
        await first.keep()
    assert world.now >= 1060
    assert world.store.holder == "a"


async def test_a_lease_that_another_makes_again_is_nobody_s_until_no_holder_can_write_any_more(world: World) -> None:
    first, second = world.lease("a"), world.lease("b")
    await first.acquire()
    world.store.item = None
    began = world.now
    await second.acquire()
    assert world.now - began > RENEW_SECONDS
    assert (first.is_held, second.is_held, world.store.holder) == (False, True, "b")


async def test_of_two_replicas_that_make_it_again_one_leads(world: World) -> None:
    world.store.item = None
    first, second = world.lease("a"), world.lease("b")
    await first.acquire()
    assert not await second._try()
    assert second.leader == "a:8443"


async def test_a_lease_that_somebody_wrote_for_years_or_with_too_large_a_number_is_taken_all_the_same(world: World) -> None:
    world.store.item["spec"] = {"holderIdentity": "somebody", "leaseDurationSeconds": 2**31 - 1, "leaseTransitions": 2**31 - 1}
    began = world.now
    first = world.lease("a")
    await first.acquire()
    assert 60 < world.now - began <= 60 + 4.0
    assert world.store.holder == "a"
    assert world.store.item["spec"]["leaseTransitions"] < 2**31
