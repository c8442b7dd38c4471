"""How much of NCCL's log and of a verdict is kept, however much a fabric has of it."""

from __future__ import annotations

from lockstep_gang.contract.fabric import RankFabric
from lockstep_gang.lifecycle.fabric.nccl import read_line
from unit.gang.fabric.cases import gpu_run, judged

HEAD = "x-0:71:88 [0] NCCL "


def test_the_first_four_faults_of_a_rank_are_kept_each_with_300_characters() -> None:
    rank = RankFabric(0)
    for peer in range(6):
        rank = read_line(rank, f"{HEAD}WARN Connect to 10.0.0.{peer}<4000> failed : {'x' * 1000}")
    assert [fault.peer for fault in rank.faults] == [f"10.0.0.{peer}" for peer in range(4)]
    assert {len(fault.text) for fault in rank.faults} == {300}
    assert (
        len(read_line(RankFabric(0), f"{HEAD}WARN NET/IB : Got completion from peer x<1> with status=12 {'x' * 1000}").faults[0].text)
        == 300
    )


def test_of_each_kind_of_name_a_rank_has_the_first_32_and_of_devices_64() -> None:
    rank, names = RankFabric(0), [f"n{number:03}" for number in range(100)]
    for name in names:
        rank = read_line(rank, f"{HEAD}INFO Using network {name}")
        rank = read_line(rank, f"{HEAD}INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/{name}/0")
        rank = read_line(rank, f"{HEAD}INFO NET/IB: NCCL Dev 0 qpn 7 mtu 5 GID {int(name[1:])} (0/1)")
    rank = read_line(rank, f"{HEAD}INFO NET/Socket : Using {' '.join(f'[{n}]{name}:10.0.0.1<0>' for n, name in enumerate(names))}")
    rank = read_line(
        rank, f"{HEAD}INFO NET/IB : Using {' '.join(f'[{n}]{name}:1/RoCE' for n, name in enumerate(names))} ; OOB eth0:10.0.0.1<0>"
    )
    assert rank.networks == rank.interfaces == tuple(names[:32])
    assert rank.gids == tuple(range(32))
    assert [traffic.network for traffic in rank.traffic] == names[-32:]  # those in use now
    assert [hca.name for hca in rank.hcas] == names[:64]


def test_a_verdict_names_32_kinds_of_ranks_that_differ_and_400_characters_of_why() -> None:
    differing = judged(gpu_run(nodes=40, ranks=1, hcas=("x" * 1000,)), "2.18-ib-peermem").differing
    assert [(ranks.node, len(ranks.why)) for ranks in differing] == [(node, 400) for node in range(32)]
