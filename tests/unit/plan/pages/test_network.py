"""Pages about a measured network, as people read them."""

from __future__ import annotations

from itertools import permutations

from lockstep.plan.cluster.hardware import MeasuredRail, NodeHardware, RailEnd
from lockstep.plan.cluster.pairs import PairRate, PairsMeasured
from lockstep.plan.pages.network import pairs_page, pairs_values

NODE = NodeHardware("h", None, (), (), ())


def measured(count: int = 3, slow: float = 1.0) -> PairsMeasured:
    rates = tuple(
        PairRate("net1", one, other, slow if 2 in (one, other) else 23.5, 25.0, microseconds=40)
        for one, other in permutations(range(count), 2)
    )
    rail = MeasuredRail("net1", {node: RailEnd("net1", f"10.1.0.{node}", 25.0, 9000) for node in range(count)})
    return PairsMeasured(
        {node: f"lab{node}" for node in range(count)},
        dict.fromkeys(range(count), NODE),
        (rail,),
        rates,
        "sockets",
    )


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
    values = pairs_values(measured())
    assert len(values["pairs"]) == 6 and values["leastGigabits"] == 1.0 and values["over"] == "sockets"
    assert values["pairs"][0] == {
        "rail": "net1", "from": "lab0", "to": "lab2", "gigabits": 1.0, "lineGigabits": 25.0, "share": 0.04, "roundTripMicroseconds": 40,
    }  # fmt: skip
