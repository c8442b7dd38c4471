"""Warnings of NCCL and its plugins in the forms of their versions: whose fault each tells of, or that it is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep_gang.contract.fabric import RankFabric
from lockstep_gang.lifecycle.fabric.nccl import fault_words, read_line
from lockstep_gang.lifecycle.fabric.rank_fabric import direct_by, transport_of

TABLE = (Path(__file__).parent / "lines.txt").read_text(encoding="utf-8").splitlines()
ROWS = [tuple(map(str.strip, line.split("|", 3))) for line in TABLE if line.strip() and not line.startswith("#")]


def read(*lines: str) -> RankFabric:
    rank = RankFabric(0)
    for line in lines:
        rank = read_line(rank, line)
    return rank


@pytest.mark.parametrize(("version", "kind", "peer", "line"), ROWS)
def test_a_warning_of_this_version_names_the_node_the_link_or_neither(version: str, kind: str, peer: str, line: str) -> None:
    faults = [(fault.kind.value, fault.peer) for fault in read(line).faults]
    assert faults == ([] if kind == "-" else [(kind, peer)]), version


def test_every_version_has_lines_that_are_faults_and_lines_that_are_none() -> None:
    assert len(ROWS) >= 40 and sum(kind == "-" for _, kind, _, _ in ROWS) >= 15
    assert {f"2.{minor}" for minor in range(19, 31)} <= {version for version, *_ in ROWS}


HEAD = "g1:70:81 [0] NCCL INFO "
GPU, NIC = f"{HEAD}DMA-BUF is available on GPU device 0", f"{HEAD}NET/Libfabric : GPU Direct RDMA Enabled for HCA 0 'rdmap79s0'"
EFA = f"{HEAD}NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)"


@pytest.mark.parametrize(
    ("lines", "way"),
    [
        ((EFA, f"{HEAD}NET/OFI Support for DMA-BUF registrations: false", GPU, NIC), "On"),
        ((GPU, EFA, f"{HEAD}NET/OFI Support for DMA-BUF registrations: false", NIC), "On"),
        ((EFA, f"{HEAD}NET/OFI Support for DMA-BUF registrations: true", GPU, NIC), "DMA-BUF"),
        ((EFA, f"{HEAD}NET/OFI Support for DMA-BUF registrations: true", NIC), ""),
        ((EFA, NIC), ""),
        ((GPU, f"{HEAD}NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"), "DMA-BUF"),
        ((f"{HEAD}NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",), "nvidia-peermem"),
    ],
)
def test_gpudirect_is_by_dma_buf_only_where_the_log_says_so(lines: tuple[str, ...], way: str) -> None:
    assert direct_by(read(*lines)) == way


def test_of_two_roce_subnets_without_a_route_the_link_is_named() -> None:
    words = [
        fault_words(fault) for _, _, _, line in ROWS for fault in read(line).faults if "have no route to each other" in fault_words(fault)
    ]
    assert len(words) == 3 and all("ibv_modify_qp" in one for one in words)


def test_google_s_plugin_runs_over_rdma() -> None:
    assert transport_of(read(f"{HEAD}Using network gIB", f"{HEAD}Channel 00/0 : 1[0] -> 0[0] [receive] via NET/gIB/0")) == "RDMA"
