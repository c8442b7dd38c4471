"""NCCL's log in the wording of its versions, read line by line into what a rank uses."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_gang.contract.fabric import FaultKind, Hca, RankFabric, Traffic
from lockstep_gang.lifecycle.fabric.nccl import messages, read_line, worst_fault
from lockstep_gang.lifecycle.fabric.rank_fabric import has_traffic, transport_of, uses_direct, why_not_direct, why_sockets
from unit.gang.fabric.cases import LOGS, read

HEAD = "x-0:71:88 [0] NCCL INFO "


def hcas(link: str, *names: str, speed: int | None = None) -> tuple[Hca, ...]:
    return tuple(Hca(name, 1, link, speed) for name in names)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2.18-ib-peermem", {"version": "2.18.1", "networks": ("IB",), "interface": "eth0", "address": "10.20.0.11"}),
        ("2.18-ib-peermem", {"hcas": hcas("IB", "mlx5_0", "mlx5_1"), "traffic": (Traffic("IB", 2, 2, 1, 1),), "inside": ("P2P/IPC",)}),
        ("2.21-roce-dmabuf", {"hcas": hcas("RoCE", "mlx5_6", "mlx5_7", "mlx5_10", "mlx5_11"), "direct_by": "DMA-BUF", "gids": (3,)}),
        ("2.21-roce-dmabuf", {"interface": "net1", "traffic": (Traffic("IB", 2, 2, 1, 1),), "version": "2.21.5"}),
        ("2.22-ib-merged-nics", {"hcas": hcas("IB", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), "hcas_whole": True}),
        ("2.26-roce-no-gpudirect", {"hcas": hcas("RoCE", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", speed=400000)}),
        ("2.27-ib-gpudirect-too-far", {"hcas": hcas("IB", "mlx5_0", speed=200000), "version": "2.27.7"}),
        ("2.29-ib-gpudirect-pairs", {"networks": ("IB",), "traffic": (Traffic("IB", 1, 1, 1, 1),), "version": "2.29.7"}),
        ("2.30-roce-rails-planes", {"inside": ("SHM",), "traffic": (Traffic("IB", 1, 1, 1, 1),), "hcas_whole": True}),
        ("2.23-plugin-ibext", {"plugin": "IBext_v8", "networks": ("IBext_v8",), "direct_by": "nvidia-peermem"}),
        ("2.19-plugin-aws-libfabric", {"plugin": "AWS Libfabric", "networks": ("AWS Libfabric",), "provider": "efa"}),
        ("2.25-plugin-libfabric-over-tcp", {"plugin": "libnccl-net-ofi.so", "provider": "tcp;ofi_rxm"}),
        ("2.26-sockets-asked-though-ib-is-listed", {"networks": ("Socket",), "interfaces": ("eth0", "eth1")}),
        ("2.20-tcp-asked", {"plugin_failed": "", "settings": ("NCCL_SOCKET_IFNAME=^lo,docker0", "NCCL_IB_DISABLE=1")}),
        ("2.28-sockets-no-device", {"hcas": (), "no_devices": "NCCL found no RDMA device", "interfaces": ("eth0",)}),
        ("2.21-two-threads-in-one-line-and-cut-off", {"networks": ("IB",), "hcas": hcas("RoCE", "mlx5_0", "mlx5_1"), "hcas_whole": True}),
        ("2.21-two-threads-in-one-line-and-cut-off", {"traffic": (Traffic("IB", 1, 1, 0, 0),)}),
        ("not-a-fault", {"faults": ()}),
    ],
)
def test_a_log_of_this_version_says(name: str, expected: dict[str, Any]) -> None:
    found = read(name)
    assert {field: getattr(found, field) for field in expected} == expected


def test_the_names_of_rails_and_planes_do_not_hide_a_device() -> None:
    assert [(hca.name, hca.port) for hca in read("2.30-roce-rails-planes").hcas] == [
        ("mlx5_0", 1),
        ("mlx5_1", 1),
        ("mlx5_2", 1),
        ("mlx5_3_dma", 1),
    ]


@pytest.mark.parametrize(
    ("name", "transport", "direct"),
    [
        ("2.18-ib-peermem", "RDMA", True),
        ("2.26-roce-no-gpudirect", "RDMA", False),
        ("2.28-sockets-no-device", "TCP", None),
        ("2.23-plugin-ibext", "RDMA", True),
        ("2.19-plugin-aws-libfabric", "RDMA", True),
        ("2.25-plugin-libfabric-over-tcp", "TCP", None),
        ("2.21-plugin-ucx", "Plugin", False),
        ("2.25-nvlink-between-nodes", "NVLink", None),
        ("2.21-one-node-only", "RDMA", None),
        ("fault-2.21-memlock", None, None),
    ],
)
def test_what_a_rank_uses(name: str, transport: str | None, direct: bool | None) -> None:
    rank = read(name)
    assert (transport_of(rank), uses_direct(rank)) == (transport, direct)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("2.18-sockets-no-libibverbs", "libibverbs could not be opened"),
        ("2.30-sockets-no-libibverbs", "libibverbs could not be opened"),
        ("2.28-sockets-no-device", "NCCL found no RDMA device that NCCL_IB_HCA=mlx5_6,mlx5_7 names"),
        ("2.26-sockets-asked-though-ib-is-listed", "NCCL_NET is Socket"),
        ("2.20-tcp-asked", "NCCL_IB_DISABLE is 1"),
        ("2.28-plugin-asked-and-missing", "NET/Plugin: Could not find: rdma libnccl-net-rdma.so"),
        ("2.25-plugin-libfabric-over-tcp", "the plugin's provider is tcp;ofi_rxm"),
    ],
)
def test_why_sockets_were_taken(name: str, why: str) -> None:
    assert why_sockets(read(name)) == why


def test_why_gpudirect_is_off() -> None:
    assert why_not_direct(read("2.26-roce-no-gpudirect")) == "NCCL found neither nvidia-peermem nor DMA-BUF for mlx5_0"
    assert why_not_direct(read("2.27-ib-gpudirect-too-far")).startswith("GPU and NIC are too far from each other (distance 9, allowed 5")


def test_receiving_straight_and_sending_through_the_host_is_gpudirect_on_older_gpus() -> None:
    rank = RankFabric(0)
    for direction, mark in (("receive", "/GDRDMA"), ("send", "")):
        rank = read_line(rank, f"{HEAD}Channel 00/0 : 1[0] -> 0[0] [{direction}] via NET/IB/0{mark}")
    assert uses_direct(rank) is True


def test_of_a_long_name_200_characters_are_kept() -> None:
    rank = read_line(RankFabric(0), f"{HEAD}Using network {'x' * 1000}")
    assert rank.networks == ("x" * 200,)


def test_channels_inside_a_node_are_no_traffic() -> None:
    assert not has_traffic(read("2.21-one-node-only"))


def test_a_message_cut_off_by_another_thread_does_not_count() -> None:
    assert list(messages(f"{HEAD}Using network Soc{HEAD}Using network IB")) == [("INFO", "Using network IB")]


def test_a_device_list_that_is_cut_off_is_not_taken_for_a_whole_one() -> None:
    rank = read_line(RankFabric(0), f"{HEAD}NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_")
    assert (len(rank.hcas), rank.hcas_whole) == (1, False)


@pytest.mark.parametrize(
    ("name", "kind", "peer", "words"),
    [
        ("fault-2.18-completion-error-12", FaultKind.PATH, "10.0.0.12", "with error 12"),
        ("fault-2.21-completion-status-12", FaultKind.PATH, "10.0.0.12", "status=12"),
        ("fault-2.29-completion-status-12", FaultKind.PATH, "10.0.0.12", "IBV_WC_RETRY_EXC_ERR(12)"),
        ("fault-2.24-local-protection", FaultKind.LOCAL, "10.0.0.12", "status=4"),
        ("fault-2.28-port-down", FaultKind.LOCAL, "", "mlx5_2:1 Got non-fatal async event: port error"),
        ("fault-2.26-no-route", FaultKind.PATH, "192.168.7.12", "ibv_modify_qp failed with 110"),
        ("fault-2.21-memlock", FaultKind.LOCAL, "", "Cannot allocate memory"),
        ("fault-2.30-no-interface", FaultKind.LOCAL, "", "no socket interface found"),
        ("fault-2.27-bootstrap-unreachable", FaultKind.PATH, "10.0.0.12", "exceeded error retry count"),
        ("fault-2.19-peer-closed", FaultKind.EFFECT, "x-1.x-headless.ns.svc.cluster.local", "Connection closed by remote peer"),
    ],
)
def test_a_warning_says_whose_fault_it_is(name: str, kind: FaultKind, peer: str, words: str) -> None:
    fault = worst_fault(read(name))
    assert (fault.kind, fault.peer) == (kind, peer)
    assert words in fault.text


def test_a_cause_takes_the_place_of_an_effect_when_there_are_many() -> None:
    rank = RankFabric(0)
    head = "x-0:71:88 [0] misc/socket.cc:1 NCCL WARN "
    for peer in range(9):
        rank = read_line(rank, f"{head}socketProgress: Connection closed by remote peer h{peer}<1>")
    rank = read_line(rank, f"{head}Call to ibv_reg_mr failed with error Cannot allocate memory")
    assert len(rank.faults) == 4
    fault = worst_fault(rank)
    assert fault.kind is FaultKind.LOCAL


def test_any_cut_of_any_line_of_any_log_is_read_without_an_error() -> None:
    for path in LOGS.glob("*.log"):
        rank = RankFabric(0)
        for line in path.read_text(encoding="utf-8").splitlines():
            for end in range(0, len(line), 3):
                rank = read_line(rank, line[:end])
                rank = read_line(rank, line[end:] + line)
        assert rank.rank == 0
