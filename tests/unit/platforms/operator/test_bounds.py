"""What the operator keeps is bounded, whoever makes more of it: of tokens, addresses, losses, runs, jobs, fields and notifications."""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64encode
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.kube.cluster import Cluster
from lockstep.plan.reconcile.notify import Message
from lockstep.plan.render.objects import Frozen, GangRun
from lockstep.platforms.operator import notify
from lockstep.platforms.operator.authenticate import Reviewed
from lockstep.platforms.operator.certificate import Certificates
from lockstep.platforms.operator.memory.history import RememberedLosses, RememberedRuns
from lockstep.platforms.operator.memory.objects import StoredObject
from lockstep.platforms.operator.notify import Notifier
from lockstep.platforms.operator.operator import Operator, Settings
from lockstep.platforms.operator.tls_port import Listener
from support.fake_cluster import FakeCluster

KEY = ("ns", "x")


def test_of_4097_good_tokens_the_oldest_is_asked_about_again() -> None:
    asked: list[str] = []

    async def review(token: str) -> dict[str, Any]:
        asked.append(token)
        return {"authenticated": True}

    async def use() -> None:
        reviewed = Reviewed(review, lambda: 0.0)
        for number in (*range(4097), 1, 0):
            await reviewed(str(number))

    asyncio.run(use())
    assert asked[4097:] == ["0"]


def test_of_4097_addresses_the_oldest_is_a_stranger_s_again() -> None:
    made = Listener.__new__(Listener)
    made._known, made._loop = {}, cast(Any, SimpleNamespace(time=lambda: 0.0))
    for number in range(4097):
        protocol: Any = object()
        made._by_protocol = {protocol: cast(Any, SimpleNamespace(is_proven=False, peer=str(number)))}
        made.prove(protocol)
    assert [*made._known] == [str(number) for number in range(1, 4097)]


def test_the_newest_256_losses_of_a_job_are_kept() -> None:
    seen, gone = RememberedLosses(), cast(Any, SimpleNamespace(pods=(), objects={}, nodes=(), sees_nodes=True, job={}, stateful_set=None))
    for number in range(300):
        status = {"phase": "Failed", "reason": "Preempting"}
        seen.see_pod(KEY, {"metadata": {"name": "x-0", "uid": str(number)}, "spec": {}, "status": status}, 0.0)
    seen.see(KEY, gone, 0.0)
    assert [*seen.of(KEY)] == [str(number) for number in range(44, 300)]


@pytest.mark.parametrize(("digests", "is_kept"), [(800, True), (1200, False)])
def test_a_frozen_run_is_remembered_up_to_32_kibibytes_of_compressed_text(digests: int, is_kept: bool) -> None:
    noise = "".join(hashlib.sha256(str(number).encode()).hexdigest() for number in range(digests))  # 32 bytes of each stay
    runs = RememberedRuns()
    runs.see("u", GangRun(Frozen("x", "ns", 1, "{}", noise), proven=True))
    assert (runs.of("u") is not None) == is_kept


def test_nothing_of_deleted_jobs_is_in_memory_after_64_of_them() -> None:
    led = Operator(Cluster(cast(Any, None)), Settings("agent:1"), b"", Certificates("", "", "", ""))
    led.server.reports.unverified("gone")
    remembered = []
    for number in range(64):
        remembered.append(led.server.reports.is_unverified("gone"))
        asyncio.run(led.work(("ns", f"gone-{number}")))
    assert all(remembered) and not led.server.reports.is_unverified("gone")


def test_of_an_annotation_and_of_a_large_object_s_fields_2048_characters_are_kept_and_of_an_event_s_message_4096() -> None:
    texts = {"small": "x" * 2046, "large": "x" * 2047}  # and two quotation marks
    metadata = {"name": "x", "uid": "u", "annotations": {"lockstep.dev/a": "x" * 2048, "lockstep.dev/b": "x" * 2049}}
    kept = StoredObject("Service", {"metadata": metadata, "spec": {**texts, "huge": "x" * (64 << 10)}}).item
    assert [*kept["spec"]] == ["small"] and [*kept["metadata"]["annotations"]] == ["lockstep.dev/a"]
    event = {"metadata": {"name": "e", "uid": "e"}, "involvedObject": {"name": "x" * 3000}, "message": "x" * 5000}
    kept = StoredObject("Event", event).item
    assert (len(kept["involvedObject"]["name"]), len(kept["message"])) == (2048, 4096)


def test_64_notifications_are_under_way_at_once_each_to_an_address_of_4096_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []

    async def post(url: str, message: Message) -> int:
        addresses.append(url)
        return await asyncio.Event().wait()

    async def story() -> None:
        secret = {"kind": "Secret", "data": {"url": b64encode(b"https://h/".ljust(5000, b"x")).decode()}}
        secrets = (secret | {"metadata": {"namespace": f"ns-{number}", "name": "hook"}} for number in range(100))
        notifier = Notifier(FakeCluster(*secrets).as_cluster, lambda key: None)
        telling = [
            asyncio.ensure_future(notifier._tell((f"ns-{number}", "x"), "u", Message("m", "hook", "url", {}, 0.0))) for number in range(100)
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        for task in telling:
            task.cancel()

    monkeypatch.setattr(notify, "_post", post)
    asyncio.run(story())
    assert [len(address) for address in addresses] == [4096] * 64
