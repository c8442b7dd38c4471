"""Pages about a measured network, as people read them."""

from __future__ import annotations

from itertools import permutations

from lockstep.plan.cluster.hardware import BusPlace, GpuPlace, HcaPort, MeasuredRail, NicPort, NodeHardware, RailEnd
from lockstep.plan.cluster.pairs import PairRate, PairsMeasured
from lockstep.plan.pages.network import near_groups, node_labels, pairs_page, pairs_values, rail_lines, topology_findings, tree

NUMA0, NUMA1 = ("0000:3a:00.0", "0000:3b:00.0"), ("0000:ba:00.0", "0000:bb:00.0")
FACTS = NodeHardware(
    "h", 64.0,
    (NicPort("eth0", "10.0.0.1", 24), NicPort("net1", "10.1.0.1", 24, 9000, 400.0, hca="mlx5_0", place=BusPlace((*NUMA0, "0000:3c:01.0",
        "0000:3d:00.0"), 0))),
    (HcaPort("mlx5_0", 1, 400.0, place=BusPlace((*NUMA0, "0000:3c:01.0", "0000:3d:00.0"), 0)),),
    (GpuPlace(0, "H100", BusPlace((*NUMA0, "0000:3c:02.0", "0000:3e:00.0"), 0)),
        GpuPlace(1, "H100", BusPlace((*NUMA1, "0000:bc:01.0", "0000:bd:00.0"), 1))),
    ("NV18",),
)  # fmt: skip


def measured(count: int = 3, slow: float = 1.0) -> PairsMeasured:
    rates = tuple(
        PairRate("net1", one, other, slow if 2 in (one, other) else 23.5, 25.0, microseconds=40)
        for one, other in permutations(range(count), 2)
    )
    rail = MeasuredRail("net1", {node: RailEnd("net1", f"10.1.0.{node}", 25.0, 9000) for node in range(count)})
    return PairsMeasured({node: f"lab{node}" for node in range(count)}, dict.fromkeys(range(count), FACTS), (rail,), rates, "sockets")


def test_the_worst_pairs_come_first_and_a_small_network_has_its_matrix() -> None:
    lines = list(pairs_page(measured()))
    assert lines[:2] == ["FROM   TO     RAIL   Gb/s   OF LINE   ROUND TRIP", "lab0   lab2   net1   1      4%        40 us"]
    assert "rail net1: 1 to 23.5 Gb/s over 6 measurements by sockets, 4% to 94% of the line rate" in lines
    assert [line.split() for line in lines[-3:]] == [["lab0", "·", "23.5", "1"], ["lab1", "23.5", "·", "1"], ["lab2", "1", "1", "·"]]


def test_a_large_network_is_summed_up() -> None:
    lines = list(pairs_page(measured(12)))
    assert len(lines) == 24
    assert lines[21] == "… and 112 measurements of 1 Gb/s or more (-o json has all)"


def test_scripts_get_every_measurement() -> None:
    values = pairs_values(measured(), hardware=True)
    assert len(values["pairs"]) == 6 and values["leastGigabits"] == 1.0 and values["over"] == "sockets"
    assert values["pairs"][0] == {
        "rail": "net1", "from": "lab0", "to": "lab2", "gigabits": 1.0, "lineGigabits": 25.0, "share": 0.04, "roundTripMicroseconds": 40,
    }  # fmt: skip
    assert values["hardware"]["lab0"]["gpus"][1]["place"]["numa"] == 1


def test_the_tree_puts_nodes_below_their_zones_and_devices_below_their_switches() -> None:
    labels = {
        "lab0": {"topology.kubernetes.io/zone": "a", "nvidia.com/gpu.clique": "c1"},
        "lab1": {"topology.kubernetes.io/zone": "b", "nvidia.com/gpu.clique": "c1"},
        "lab2": {"topology.kubernetes.io/zone": "a", "nvidia.com/gpu.clique": "c1"},
    }
    shown = measured()
    lines = list(tree(shown.nodes, shown.names, labels))
    assert lines[:10] == [
        "zone a",
        "  NVLink domain c1",
        "    node 0: lab0",
        "      between its GPUs: NV18 (nvidia-smi topo -m)",
        "      NUMA node 0",
        "        PCI switch 0000:3b:00.0: GPU 0, net1 (mlx5_0) 400 Gb/s",
        "      NUMA node 1",
        "        PCI switch 0000:bb:00.0: GPU 1",
        "      on no PCI bus: eth0",
        "    node 2: lab2",
    ]
    assert [line for line in lines if line.startswith(("zone", "  NVLink"))] == [
        "zone a",
        "  NVLink domain c1",
        "zone b",
        "  NVLink domain c1",
    ]
    assert next(tree(shown.nodes, shown.names, {})) == "node 0: lab0"


def test_gpus_without_a_nic_on_their_numa_node_are_told() -> None:
    finding, *_ = topology_findings(measured())
    assert (finding.subject, finding.message) == (
        "lab0", "GPUs 1: every NIC is on another NUMA node, so their traffic crosses the link between processors",
    )  # fmt: skip


def test_nodes_are_near_each_other_if_they_are_fast_both_ways() -> None:
    assert near_groups(measured().rates, range(3)) == [[0, 1], [2]]
    assert near_groups(measured(slow=23.0).rates, range(3)) == [[0, 1, 2]]
    assert list(rail_lines(measured()))[1:] == ["  near each other: lab0, lab1", "  near each other: lab2"]


def test_only_labels_of_places_are_taken() -> None:
    node = {"metadata": {"name": "n", "labels": {"topology.kubernetes.io/rack": "r\x1b7", "secret": "x"}}}
    assert node_labels([node]) == {"n": {"topology.kubernetes.io/rack": "r\\x1b7"}}
