"""The schedule of pairs, and where measurements place the fault: by tables of planted faults, each named, and nobody falsely."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.cluster.hardware import MeasuredRail, NodeHardware, RailEnd
from lockstep.plan.cluster.pairs import Blame, Pair, PairRate, PairsMeasured, below, blamed, judge_pairs, rounds, seconds_each, usual_gbs

BUDGET_SECONDS = 240.0
LEAST_SECONDS = 0.25


@pytest.mark.parametrize("count", range(2, 18))
def test_each_pair_meets_once_and_no_node_twice_in_a_round(count: int) -> None:
    nodes = [3 * node + 1 for node in range(count)]
    schedule = rounds(nodes)
    assert len(schedule) == count - 1 + count % 2
    for pairs in schedule:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    assert sorted(tuple(sorted(pair)) for pairs in schedule for pair in pairs) == sorted(combinations(nodes, 2))


def test_measurements_of_64_nodes_keep_to_minutes() -> None:
    assert seconds_each(2, 1) == 2.0
    assert seconds_each(64, 1) * 2 * 63 == pytest.approx(BUDGET_SECONDS)
    assert seconds_each(64, 8) == LEAST_SECONDS
    assert seconds_each(64, 8) * 2 * 63 * 8 < 5 * 60


def pairs_of(nodes: Iterable[int]) -> list[Pair]:
    return list(permutations(nodes, 2))


def of_node(node: int, nodes: Iterable[int]) -> set[Pair]:
    return {pair for pair in pairs_of(nodes) if node in pair}


CROSSING = {pair for pair in pairs_of(range(5)) if (pair[0] < 2) != (pair[1] < 2)}


@pytest.mark.parametrize(
    ("count", "slow", "blames"),
    [
        (5, set(), []),
        (3, of_node(1, range(3)), [Blame((1,))]),
        (4, of_node(1, range(4)), [Blame((1,))]),
        (4, of_node(1, range(4)) | of_node(2, range(4)), [Blame((1,)), Blame((2,))]),
        (4, {pair for pair in pairs_of(range(4)) if pair[0] == 2}, [Blame((2,), receives=False)]),
        (4, {pair for pair in pairs_of(range(4)) if pair[1] == 2}, [Blame((2,), sends=False)]),
        (4, {(0, 3), (3, 0)}, [Blame((0, 3))]),
        (3, {(0, 2), (2, 0)}, [Blame((0, 2))]),
        (4, {(3, 0)}, [Blame((0, 3), sends=False)]),
        (5, CROSSING, [Blame((0, 1, 2, 3, 4), ((0, 1), (2, 3, 4)))]),
        (5, CROSSING | of_node(4, range(5)), [Blame((0, 1, 2, 3), ((0, 1), (2, 3))), Blame((4,))]),
        (2, {(0, 1), (1, 0)}, [Blame((0, 1))]),
    ],
)  # fmt: skip
def test_the_smallest_explanation_is_blamed(count: int, slow: set[Pair], blames: list[Blame]) -> None:
    assert blamed(slow, pairs_of(range(count))) == blames


NAMES = {node: f"lab{node}" for node in range(8)}
Speed = Callable[[str, int, int], float]


def measured(
    speed: Speed, *, count: int = 4, rails: tuple[str, ...] = ("net1",), line: float | None = 25.0, cores: float | None = 8.0,
    used: float = 0.5, ends: Mapping[tuple[str, int], RailEnd] | None = None, errors: Mapping[Pair, str] | None = None,
) -> PairsMeasured:  # fmt: skip
    """A measurement as the speed says; ports of `line` Gb/s and an MTU of 9000 unless `ends` says otherwise."""
    rates = [
        PairRate(rail, one, other, 0.0 if (one, other) in (errors or {}) else speed(rail, one, other), line,
                 error=(errors or {}).get((one, other), ""), microseconds=50, sender_cores=used)
        for rail in rails for one, other in pairs_of(range(count))
    ]  # fmt: skip
    described = [
        MeasuredRail(rail, {node: (ends or {}).get((rail, node), RailEnd(rail, f"10.0.0.{node}", line, 9000)) for node in range(count)})
        for rail in rails
    ]
    nodes = {node: NodeHardware(f"h{node}", cores, (), (), ()) for node in range(count)}
    return PairsMeasured({node: NAMES[node] for node in range(count)}, nodes, tuple(described), tuple(rates), "sockets")


def noisy(rail: str, one: int, other: int) -> float:
    """Rates of a healthy network, up to a tenth apart."""
    return 23.5 - (one * 7 + other * 3) % 5 * 0.5


def messages(findings: list[Finding]) -> list[str]:
    return [f"{one.subject}: {one.message}" for one in findings]


@pytest.mark.parametrize("line", [25.0, None])
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_a_healthy_network_has_no_finding(count: int, line: float | None) -> None:
    assert judge_pairs(measured(noisy, count=count, line=line)) == []


def test_a_slow_cable_is_named_with_its_node_port_rate_and_share() -> None:
    slow = measured(lambda rail, one, other: 1.0 if 2 in (one, other) else noisy(rail, one, other))
    (finding,) = judge_pairs(slow)
    assert finding.subject == "net1" and finding.outcome is Outcome.WARNING
    assert finding.message.startswith("lab2 (net1): 1 Gb/s, 4% of the line rate to and from 3 other nodes; the other pairs 2")
    assert finding.fix.startswith("look at its cable and port: ethtool net1")
    assert [(rate.sender == 2 or rate.receiver == 2) for rate in slow.worst()] == [True] * 6 + [False] * 6
    assert (len(below(slow, 0.8)), len(below(slow, 0.03))) == (6, 0)
    assert slow.least_gbs() == 1.0


def test_one_direction_is_named_as_such() -> None:
    (finding,) = judge_pairs(measured(lambda rail, one, other: 2.0 if other == 1 else 23.0))
    assert "lab1 (net1): 2 Gb/s, 8% of the line rate from 3 other nodes" in finding.message


def test_a_port_that_negotiated_less_is_told_by_both_speeds() -> None:
    ends = {("net1", 3): RailEnd("net1", "10.0.0.3", 1.0, 9000)}
    (finding,) = judge_pairs(measured(lambda rail, one, other: 0.94 if 3 in (one, other) else 23.0, ends=ends))
    assert finding.fix == "its port runs at 1 Gb/s, others at 25: another cable or switch port, or auto-negotiation"


def test_a_wireless_port_is_told() -> None:
    ends = {("net1", 3): RailEnd("wlan0", "10.0.0.3", None, 1500, wireless=True),
        **{("net1", node): RailEnd("e", f"10.0.0.{node}", None, 1500) for node in range(3)}}  # fmt: skip
    (finding,) = judge_pairs(measured(lambda rail, one, other: 0.2 if 3 in (one, other) else 0.9, ends=ends, line=None))
    assert finding.fix == "wlan0 is wireless: use a cable"


def test_a_slow_rail_is_one_finding_and_not_one_a_node() -> None:
    slow = measured(lambda rail, one, other: noisy(rail, one, other) * (0.3 if rail == "net2" else 1), rails=("net1", "net2"))
    (finding,) = judge_pairs(slow)
    assert messages([finding])[0].startswith("net2: the rail is slow everywhere: ")
    assert finding.fix.startswith("look at its switch")
    assert judge_pairs(measured(noisy), stated=0.99)[0].message.startswith("the rail is slow everywhere")


def test_full_processors_are_not_the_networks_fault() -> None:
    (finding,) = judge_pairs(measured(lambda *_: 5.0, cores=1.0, used=0.97))
    assert "the nodes' processors are the limit" in finding.fix


def test_a_small_mtu_is_the_first_suspect_of_a_slow_rail() -> None:
    ends = {("net1", node): RailEnd("net1", f"10.0.0.{node}", 25.0, 1500) for node in range(4)}
    assert "its MTU is 1500" in judge_pairs(measured(lambda *_: 5.0, ends=ends))[0].fix


def test_mtus_that_differ_are_told_with_the_odd_node() -> None:
    ends = {("net1", 0): RailEnd("net1", "10.0.0.0", 25.0, 1500)}
    assert messages(judge_pairs(measured(noisy, ends=ends))) == ["net1: MTUs differ: lab0 1500, the others 9000"]


def test_a_node_that_is_slow_on_all_rails_has_no_bad_cable() -> None:
    findings = judge_pairs(measured(lambda rail, one, other: 3.0 if 0 in (one, other) else 23.0, rails=("net1", "net2")))
    assert messages(findings)[-1] == "lab0: lab0 is slow on all 2 rails" and findings[-1].fix.startswith("not a cable")


def test_a_link_between_switches_is_told_by_its_groups() -> None:
    (finding,) = judge_pairs(measured(lambda rail, one, other: 5.0 if (one, other) in CROSSING else 23.0, count=5))
    assert finding.message.startswith("5 Gb/s, 20% of the line rate between the groups [lab0, lab1] and [lab2, lab3, lab4], 23 Gb/s inside")


def test_a_node_that_nobody_reaches_fails_with_the_error() -> None:
    errors = {pair: "no answer in 5 s from 10.0.0.3" for pair in pairs_of(range(4)) if 3 in pair}
    (finding,) = judge_pairs(measured(noisy, errors=errors))
    assert finding.outcome is Outcome.FAILED and "lab3 (net1): no data (no answer in 5 s from 10.0.0.3)" in finding.message
    assert "firewall" in finding.fix


def test_a_rail_over_which_nobody_is_reached_fails_once() -> None:
    errors = dict.fromkeys(pairs_of(range(4)), "No route to host")
    assert messages(judge_pairs(measured(noisy, errors=errors))) == ["net1: no node reaches another over this rail: No route to host"]


def test_a_pair_below_the_rails_usual_rate_counts_where_no_port_states_a_line_rate() -> None:
    slow = measured(lambda rail, one, other: 1.0 if (one, other) == (0, 1) else 10.0, line=None)
    assert [(rate.sender, rate.receiver) for rate in below(slow, 0.5)] == [(0, 1)]
    assert usual_gbs(slow.rates) == 10.0


def test_a_kernel_that_does_not_bind_to_interfaces_is_told_where_rails_could_be_mixed_up() -> None:
    for rails, expected in ((("net1",), []), (("net1", "net2"), ["rails: on lab2 only addresses choose the interface"])):
        healthy = measured(noisy, rails=rails)
        rates = tuple(replace(rate, is_bound=rate.sender != 2) for rate in healthy.rates)
        assert [one.partition(",")[0] for one in messages(judge_pairs(replace(healthy, rates=rates)))] == expected


def test_of_two_nodes_nobody_is_blamed_alone() -> None:
    (finding,) = judge_pairs(measured(lambda rail, one, other: 5.0 if one == 0 else 23.0, count=2, line=None))
    assert finding.message == "lab0 (net1) to lab1 (net1): 5 Gb/s, 23 Gb/s the other way"


def test_a_sender_of_many_cores_is_the_limit_when_nine_tenths_of_four_are_busy() -> None:
    for used, words in ((3.65, "the nodes' processors are the limit"), (3.55, "look at its switch")):
        assert words in judge_pairs(measured(lambda *_: 5.0, cores=64.0, used=used))[0].fix
