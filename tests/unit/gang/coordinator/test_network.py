"""Where a node listens: on the pod's addresses only, and on ports that are free in both families."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_gang.agent.preflight.allreduce_rank import store
from lockstep_gang.agent.preflight.network import ProbePort
from lockstep_gang.contract.run import POD_IPS
from lockstep_gang.coordinator import network
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.network import any_free_port, free_port, listening_addresses
from lockstep_gang.coordinator.server import Server
from unit.gang.cases import KEY, make_run

NAME = "x-0.x-headless.ns.svc"
POD, ELSEWHERE = "127.0.0.2", "127.0.0.3"


@pytest.mark.parametrize(
    ("address", "pod", "expected"),
    [
        ("127.0.0.1", "10.0.0.1", ["127.0.0.1"]),
        ("::1", "10.0.0.1", ["::1"]),
        (NAME, "10.0.0.1", ["10.0.0.1"]),
        (NAME, "10.0.0.1,fd00::1", ["10.0.0.1", "fd00::1"]),
        (NAME, "fd00::1", ["fd00::1"]),
        (NAME, "", None),
        (NAME, "nonsense", None),
        (NAME, None, None),
    ],
)
def test_a_node_listens_on_its_pod_s_addresses(
    address: str, pod: str | None, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(POD_IPS, raising=False)
    if pod is not None:
        monkeypatch.setenv(POD_IPS, pod)
    assert listening_addresses(address) == expected


def is_answered(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


async def test_coordinator_and_preflight_are_not_met_on_the_machine_s_other_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POD_IPS, POD)
    run = make_run(run_dir=str(tmp_path), addresses=(NAME, NAME), coordinator_port=any_free_port("127.0.0.1"))
    output = Output(lambda line: None, tuple, lambda line: None)
    server = Server(run, KEY, Coordinator(run, KEY, output), output)
    assert await server.start() == (POD, run.coordinator_port)
    door = ProbePort(run, KEY, 0)
    port = await door.open()
    answered = [await asyncio.to_thread(is_answered, address, p) for p in (run.coordinator_port, port) for address in (POD, ELSEWHERE)]
    door.close()
    await server.stop()
    assert answered == [True, False, True, False]


def test_the_processes_of_a_preflight_meet_on_the_pod_s_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    port = any_free_port("127.0.0.1")
    for name, value in ((POD_IPS, POD), ("MASTER_ADDR", NAME), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {}
    store(SimpleNamespace(TCPStore=lambda *_, **named: given.update(named)), 0, 2, timedelta(seconds=1))
    assert given["is_master"] is True
    with socket.socket(fileno=given["master_listen_fd"]) as listening:
        listening.listen()
        assert (is_answered(POD, port), is_answered(ELSEWHERE, port)) == (True, False)


@contextmanager
def listener(family: socket.AddressFamily, host: str) -> Iterator[int]:
    with socket.socket(family) as made:
        if family is socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, 0))
        made.listen()
        yield made.getsockname()[1]


BOTH = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


@pytest.mark.parametrize(("family", "host"), BOTH)
def test_a_port_that_somebody_has_in_either_family_is_not_free(family: socket.AddressFamily, host: str) -> None:
    with listener(family, host) as taken:
        assert free_port(NAME, taken) > taken
        assert free_port(host, taken) > taken


@pytest.mark.parametrize("host", [NAME, "127.0.0.1", "::1"])
def test_any_free_port_is_free_in_both_families(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[int] = []
    is_free = network._is_free

    def taken_at_first(hosts: list[str], port: int) -> bool:
        first.append(port)
        return len(first) > 1 and is_free(hosts, port)

    monkeypatch.setattr(network, "_is_free", taken_at_first)
    assert any_free_port(host) == first[-1]
    assert len(first) == 2


def test_a_machine_without_one_family_has_free_ports_in_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyIPv4(socket.socket):
        def __init__(self, family: int = socket.AF_INET) -> None:
            if family == socket.AF_INET6:
                raise OSError(97, "Address family not supported by protocol")
            super().__init__(family)

    with listener(socket.AF_INET, "127.0.0.1") as taken:
        monkeypatch.setattr(network.socket, "socket", OnlyIPv4)
        assert taken < free_port(NAME, taken) <= taken + network.CANDIDATES


@pytest.mark.parametrize(("free", "chosen"), [(5063, 5063), (5064, 5000)])
def test_a_free_port_is_looked_for_among_64(monkeypatch: pytest.MonkeyPatch, free: int, chosen: int) -> None:
    monkeypatch.setattr(network, "_is_free", lambda _, port: port == free)
    assert free_port(NAME, 5000) == chosen
