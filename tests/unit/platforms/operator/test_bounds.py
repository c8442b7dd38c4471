"""Limits of what the operator keeps in memory: addresses, losses, runs, jobs and fields."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography import x509

from lockstep.kube.cluster import Cluster
from lockstep.plan.render.objects import Frozen, GangRun
from lockstep.platforms.operator import tls_port
from lockstep.platforms.operator.certificate import Certificates, make_certificates, needs_renewal
from lockstep.platforms.operator.memory.history import RememberedLosses, RememberedRuns
from lockstep.platforms.operator.memory.inventory import WATCHED
from lockstep.platforms.operator.memory.objects import StoredObject
from lockstep.platforms.operator.memory.queue import WorkQueue
from lockstep.platforms.operator.operator import Operator, Settings
from lockstep.platforms.operator.tls_port import Connection, Listener
from lockstep_gang.contract.run import JobIdentity
from unit.kube.test_bounds import Recording

KEY = ("ns", "x")
NOW = datetime(2027, 1, 1, tzinfo=UTC)


def test_of_16385_addresses_the_oldest_is_a_stranger_s_again() -> None:
    made = Listener.__new__(Listener)
    made._known, made._open, made._loop = {}, {}, cast(Any, SimpleNamespace(time=lambda: 0.0))
    for number in range(16385):
        protocol: Any = object()
        made._by_protocol = {protocol: Connection(str(number), "")}
        made.prove(protocol, JobIdentity("x", "ns", "uid"))
    assert [*made._known] == [str(number) for number in range(1, 16385)]


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


@pytest.mark.parametrize(("namespaces", "at_once"), [(1, 8), (3, 16)])
async def test_sixteen_jobs_are_worked_on_at_once_and_eight_of_a_namespace(namespaces: int, at_once: int) -> None:
    begun: list[object] = []

    async def work(key: object) -> None:
        begun.append(key)
        await asyncio.Event().wait()

    made = WorkQueue(work)
    running = asyncio.ensure_future(made.run())
    for number in range(60):
        made.mark((f"ns-{number % namespaces}", str(number)))
    for _ in range(5):
        await asyncio.sleep(0)
    running.cancel()
    assert len(begun) == at_once


def test_an_authority_is_good_for_ten_years_and_a_certificate_for_one_which_is_renewed_a_month_before() -> None:
    made, day = make_certificates(("x",), NOW), timedelta(days=1)
    ends = [x509.load_pem_x509_certificate(text.encode()).not_valid_after_utc - NOW for text in (made.ca_cert, made.tls_cert)]
    assert ends == [3650 * day, 365 * day]
    assert [needs_renewal(made, ("x",), NOW + days * day) for days in (335, 336)] == [False, True]


def test_512_connections_are_taken_in_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turned_away: list[object] = []
    monkeypatch.setattr(tls_port, "turn_away", turned_away.append)
    made = Listener.__new__(Listener)
    made._known, made._loop = {}, cast(Any, SimpleNamespace(time=lambda: 0.0))
    made._listening = cast(Any, SimpleNamespace(accept=lambda: (None, ("10.0.0.1", 1))))
    made._has_room = lambda newcomer: False  # type: ignore[method-assign]
    made._accept()
    assert len(turned_away) == 512


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_4096_connections_may_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    waiting: list[int] = []
    monkeypatch.setattr(socket.socket, "listen", lambda _, backlog: waiting.append(backlog))
    tls_port.listen(host, 0).close()
    assert waiting == [4096]


def test_objects_are_listed_by_pages_of_100() -> None:
    led = Operator(Cluster(cast(Any, connection := Recording())), Settings("agent:1"), b"", Certificates("", "", "", ""))
    asyncio.run(led._list(WATCHED[0], set()))
    assert ["limit=100" in url.partition("?")[2].split("&") for url in connection.urls] == [True]
