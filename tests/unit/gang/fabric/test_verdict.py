"""What was asked for against what all ranks' NCCL says: True, False or Unknown, with a reason and a sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep_gang.contract.fabric import FabricAsked, FabricReason, RankFabric, Verified
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.fabric.verdict import names_words, number_runs, verdict
from lockstep_spec.choices import DegradedPolicy
from unit.gang.cases import make_run
from unit.gang.fabric.cases import all_ranks, gpu_run, judged, read, without_traffic

ROCE4 = ("mlx5_6", "mlx5_7", "mlx5_10", "mlx5_11")


@pytest.mark.parametrize(
    ("names", "asked", "message"),
    [
        (["2.30-roce-rails-planes"], {}, "RDMA over mlx5_3_dma, mlx5_0..2 (RoCE), GPUDirect by DMA-BUF, verified on 8 of 8 ranks"),
        (["2.21-roce-dmabuf"], {"hcas": ROCE4, "gpu_direct": True},
            "RDMA over mlx5_6, mlx5_7, mlx5_10, mlx5_11 (RoCE), GPUDirect by DMA-BUF, verified on 8 of 8 ranks"),
        (["2.18-ib-peermem"], {"gpu_direct": True}, "RDMA over mlx5_0, mlx5_1 (IB), GPUDirect by nvidia-peermem, verified on 8 of 8 ranks"),
        (["2.23-plugin-ibext"], {}, "RDMA over mlx5_0, mlx5_1 (IB), GPUDirect by nvidia-peermem, verified on 8 of 8 ranks"),
        (["2.22-ib-merged-nics"], {"rails": 4}, "RDMA over mlx5_0..3 (IB), with GPUDirect, verified on 8 of 8 ranks"),
        (["2.19-plugin-aws-libfabric"], {}, "RDMA over AWS Libfabric, with GPUDirect, verified on 8 of 8 ranks"),
        (["2.26-roce-no-gpudirect"], {},
            "RDMA over mlx5_0..3 (RoCE, 400 Gb/s), without GPUDirect (NCCL found neither nvidia-peermem nor DMA-BUF for mlx5_0), verified"
            " on 8 of 8 ranks"),
        (["2.25-nvlink-between-nodes"], {}, "NVLink between nodes (MNNVL), verified on 8 of 8 ranks"),
        (["2.20-tcp-asked"], {"transport": "TCP"}, "TCP over eth0, verified on 8 of 8 ranks"),
        (["2.18-sockets-no-libibverbs"], {"transport": "TCP"}, "TCP over enp1s0, verified on 8 of 8 ranks"),
    ],
)  # fmt: skip
def test_a_fabric_as_asked_is_verified(names: list[str], asked: dict[str, Any], message: str) -> None:
    found = judged(gpu_run(**asked), *names)
    assert (found.verified, found.reason, found.message) == (Verified.TRUE, FabricReason.VERIFIED, message)


@pytest.mark.parametrize(
    ("names", "asked", "reason", "message"),
    [
        (["2.18-ib-peermem", "2.18-sockets-no-libibverbs"], {}, "FellBackToTCP",
         "asked for RDMA, ranks 4–7 on node 1 use sockets (enp1s0): libibverbs could not be opened"),
        (["2.28-sockets-no-device"], {}, "FellBackToTCP",
         "asked for RDMA, all 8 ranks use sockets (eth0): NCCL found no RDMA device that NCCL_IB_HCA=mlx5_6,mlx5_7 names"),
        (["2.26-sockets-asked-though-ib-is-listed"], {}, "FellBackToTCP",
            "asked for RDMA, all 8 ranks use sockets (eth0, eth1): NCCL_NET is Socket"),
        (["2.25-plugin-libfabric-over-tcp"], {}, "FellBackToTCP",
            "asked for RDMA, all 8 ranks use sockets (eth0): the plugin's provider is tcp;ofi_rxm"),
        (["2.21-roce-dmabuf", "2.24-hca-subset"], {"hcas": ROCE4}, "HCASubset",
         "asked for RDMA over all rails, ranks 4–7 on node 1 have mlx5_6, mlx5_7 and lack mlx5_10, mlx5_11"),
        (["2.24-hca-subset"], {"rails": 4}, "HCASubset",
         "asked for RDMA over all rails, all 8 ranks have 2 RDMA devices (mlx5_6, mlx5_7) for 4 rails"),
        (["2.26-roce-no-gpudirect"], {"gpu_direct": True}, "GPUDirectDisabled",
         "asked for GPUDirect RDMA, all 8 ranks go through host memory: NCCL found neither nvidia-peermem nor DMA-BUF for mlx5_0"),
        (["2.29-ib-gpudirect-pairs", "2.27-ib-gpudirect-too-far"], {"gpu_direct": True}, "GPUDirectDisabled",
         "asked for GPUDirect RDMA, ranks 4–7 on node 1 go through host memory: GPU and NIC are too far from each other (distance 9,"
         " allowed 5:"
         " NCCL_NET_GDR_LEVEL)"),
        (["2.30-roce-rails-planes", "2.21-roce-dmabuf"], {}, "RanksDiffer", "ranks 4–7 on node 1 have NCCL 2.21.5, unlike most"),
        (["2.18-ib-peermem", "2.18-ib-peermem", "2.21-roce-dmabuf"], {"nodes": 3}, "RanksDiffer",
            "ranks 8–11 on node 2 have RoCE, unlike most"),
        (["2.18-ib-peermem"], {"transport": "TCP"}, "OtherTransport", "asked for TCP, all 8 ranks use IB"),
    ],
)  # fmt: skip
def test_a_fabric_that_is_not_as_asked_is_named_with_its_ranks(names: list[str], asked: dict[str, Any], reason: str, message: str) -> None:
    found = judged(gpu_run(**asked), *names)
    assert (found.verified, found.reason.value, found.message) == (Verified.FALSE, reason, message)
    assert found.differing


def test_one_rank_of_a_node_is_named_in_the_singular() -> None:
    run = gpu_run()
    ranks = list(all_ranks(run, "2.18-ib-peermem"))
    ranks[6] = read("2.18-sockets-no-libibverbs", 6)
    found = verdict(run, tuple(ranks))
    assert found.message == "asked for RDMA, rank 6 on node 1 uses sockets (enp1s0): libibverbs could not be opened"
    assert [(d.node, d.ranks) for d in found.differing] == [(1, "6")]


def test_a_node_without_gpudirect_differs_from_one_that_has_it_though_nobody_asked() -> None:
    run = gpu_run()
    ranks = [replace(read("2.29-ib-gpudirect-pairs", rank), version="") for rank in range(8)]
    plain = tuple(replace(t, received_direct=0, sent_direct=0) for t in ranks[0].traffic)
    ranks[4:] = [replace(rank, traffic=plain) for rank in ranks[4:]]
    found = verdict(run, tuple(ranks))
    assert (found.reason, found.message) == (
        FabricReason.RANKS_DIFFER,
        "ranks 4–7 on node 1 go through host memory, unlike those of other nodes",
    )


def test_a_rank_is_compared_with_those_in_its_place_on_nodes_with_other_numbers_of_ranks() -> None:
    """Ranks 0 and 1 are on node 0, 2 and 3 the first ones of nodes 1 and 2: only they and rank 0 are in the same place."""
    run = replace(gpu_run(nodes=3, ranks=2), node_ranks=(2, 1, 1))
    direct = [replace(read("2.29-ib-gpudirect-pairs", rank), version="") for rank in range(4)]
    plain = tuple(replace(t, received_direct=0, sent_direct=0) for t in direct[0].traffic)
    found = verdict(run, (*direct[:3], replace(direct[3], traffic=plain)))
    assert (found.reason, [(d.node, d.ranks) for d in found.differing]) == (FabricReason.RANKS_DIFFER, [(2, "3")])
    farther = verdict(run, (direct[0], replace(direct[1], traffic=plain), *direct[2:]))
    assert farther.reason is FabricReason.VERIFIED  # no other node has a second GPU to compare it with


def test_devices_of_other_names_on_another_node_are_the_same_fabric() -> None:
    """The names of virtual functions differ from rack to rack."""
    run = gpu_run()
    ranks = list(all_ranks(run, "2.18-ib-peermem"))
    for index in range(4, 8):
        ranks[index] = replace(ranks[index], hcas=tuple(replace(hca, name=f"mlx5_{9 + i}") for i, hca in enumerate(ranks[index].hcas)))
    found = verdict(run, tuple(ranks))
    assert found.reason is FabricReason.VERIFIED
    assert found.hcas == ("mlx5_0", "mlx5_1", "mlx5_9", "mlx5_10")


def test_a_list_of_devices_is_not_their_use() -> None:
    run = gpu_run()
    found = verdict(run, tuple(without_traffic(rank) for rank in all_ranks(run, "2.18-ib-peermem")))
    assert (found.verified, found.reason) == (Verified.UNKNOWN, FabricReason.WAITING)


def test_a_rank_that_only_its_neighbors_connect_for_is_verified_with_them() -> None:
    run = gpu_run()
    ranks = tuple(r if r.rank in (3, 4) else without_traffic(r) for r in all_ranks(run, "2.18-ib-peermem"))
    found = verdict(run, ranks)
    assert found.verified is Verified.TRUE


def test_silence_is_waited_for_and_after_steps_it_is_said() -> None:
    run = gpu_run()
    ranks: tuple[RankFabric | None, ...] = (*all_ranks(run, "2.18-ib-peermem")[:6], None, None)
    early, late = verdict(run, ranks), verdict(run, ranks, steps_done=True)
    assert (early.reason, late.reason) == (FabricReason.WAITING, FabricReason.NO_LOG)
    assert late.message.startswith("ranks 6–7 train and NCCL has not logged which network they use")


def test_a_plugin_that_does_not_say_over_what_it_runs_is_not_verified() -> None:
    found = judged(gpu_run(), "2.21-plugin-ucx")
    assert (found.verified, found.reason) == (Verified.UNKNOWN, FabricReason.PLUGIN_TRANSPORT)
    assert "UCX" in found.message


def test_a_log_that_a_person_has_sent_elsewhere_is_named() -> None:
    run = gpu_run()
    found = verdict(run, tuple(RankFabric(rank, unread="NCCL_DEBUG is WARN: leave it out") for rank in range(8)))
    assert (found.reason, found.message) == (
        FabricReason.NO_LOG,
        "NCCL's log is not read on ranks 0–7: NCCL_DEBUG is WARN: leave it out",
    )


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (gpu_run(nodes=1), FabricReason.SINGLE_NODE),
        (make_run(fabric=FabricAsked("TCP")), FabricReason.GLOO),
        (make_run(fabric=FabricAsked("RDMA", degraded_policy=DegradedPolicy.FAIL)), FabricReason.GLOO),
    ],
)
def test_where_there_is_nothing_to_verify_it_says_so(run: Run, reason: FabricReason) -> None:
    ranks = tuple(RankFabric(rank, networks=("gloo",), interface="eth0") for rank in range(run.world_size))
    found = verdict(run, ranks if run.gpus_per_node == 0 else all_ranks(run, "2.21-one-node-only"))
    assert (found.verified, found.reason) == (Verified.UNKNOWN, reason)


def test_gloo_names_its_interface_and_that_it_has_no_rdma() -> None:
    found = verdict(make_run(fabric=FabricAsked("RDMA")), (RankFabric(0, networks=("gloo",), interface="eth0"), None))
    assert found.message == "CPU ranks over gloo (over eth0): nothing to verify; RDMA was asked for, which gloo does not have"
    assert (found.transport, found.interfaces) == ("gloo", ("eth0",))


def test_a_run_that_does_not_say_what_was_asked_has_no_verdict() -> None:
    assert verdict(make_run(gpus_per_node=1), (None, None)) is None


@pytest.mark.parametrize(
    ("asked", "has", "lacks"),
    [
        (("mlx5_1",), "mlx5_10", ()),  # a name is a beginning
        (("=mlx5_1",), "mlx5_10", ("mlx5_1",)),  # unless it is exact
        (("=mlx5_1",), "mlx5_1_dma", ()),
        (("mlx5_1:2",), "mlx5_1", ("mlx5_1:2",)),  # another port
        (("mlx5",), "mlx5_0", ()),
    ],
)
def test_names_are_compared_as_nccl_compares_them(asked: tuple[str, ...], has: str, lacks: tuple[str, ...]) -> None:
    from lockstep_gang.lifecycle.fabric.rank_fabric import missing_hcas

    rank = read("2.27-ib-gpudirect-too-far")
    assert missing_hcas(replace(rank, hcas=(replace(rank.hcas[0], name=has),)), asked) == lacks


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("=mlx5_6", "=mlx5_7", "=mlx5_10", "=mlx5_11"), ""),
        (("=mlx5_6", "=mlx5_7", "=mlx5_10"), ", though nobody asked for mlx5_11"),  # a script has set it anew
        (("mlx5_6", "mlx5_7", "mlx5_1"),
            ", though nobody asked for mlx5_10, mlx5_11 (NCCL treats names as prefixes, unless the list starts with =)"),
        (("mlx5",), ""),
        ((), ""),
    ],
)  # fmt: skip
def test_a_device_in_use_that_nobody_named_is_told(asked: tuple[str, ...], said: str) -> None:
    found = judged(gpu_run(hcas=asked), "2.21-roce-dmabuf")
    assert found.message == f"RDMA over mlx5_6, mlx5_7, mlx5_10, mlx5_11 (RoCE){said}, GPUDirect by DMA-BUF, verified on 8 of 8 ranks"


def test_numbers_and_names_that_follow_each_other_are_one() -> None:
    assert number_runs([7, 4, 5, 6, 9]) == "4–7, 9"
    assert names_words(["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "bond0", "eth"]) == "eth, mlx5_0..3, bond0"
