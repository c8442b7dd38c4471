"""Slow and cut cables in real networks: nodes in network namespaces, rails of cables to a switch, limits by tc. What is slow is named, and
nothing else.

The limits are far below what this machine carries, and what measures goes before all else (chrt). Still, beside a second lane of tests
rates suffer.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from lockstep.plan.cluster.finding import Finding
from lockstep.plan.cluster.pairs import PairsMeasured, Way, below, judge_pairs
from lockstep.platforms.jobs import netrates
from support.process_place import ProcessPlace

pytestmark = pytest.mark.long
LINE, SLOW = 100, 10  # Mb/s


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Lab:
    """Nodes with a port a rail, each at a switch of that rail; `second`: of these nodes at another one."""

    nodes: int
    rails: int
    second: Sequence[int] = ()

    @property
    def mark(self) -> str:
        return f"ls{os.getpid() % 100000}"

    def node(self, node: int) -> str:
        return f"{self.mark}n{node}"

    @property
    def hub(self) -> str:
        return f"{self.mark}hub"

    def up(self) -> None:
        run("ip", "netns", "add", self.hub)
        for node in range(self.nodes):
            run("ip", "netns", "add", self.node(node))
            run("ip", "-n", self.node(node), "link", "set", "lo", "up")
        for rail in range(self.rails):
            for switch in ("a", "b") if self.second else ("a",):
                run("ip", "-n", self.hub, "link", "add", f"sw{rail}{switch}", "type", "bridge")
                run("ip", "-n", self.hub, "link", "set", f"sw{rail}{switch}", "up")
            if self.second:
                run("ip", "-n", self.hub, "link", "add", f"up{rail}a", "type", "veth", "peer", "name", f"up{rail}b")
                for switch in ("a", "b"):
                    run("ip", "-n", self.hub, "link", "set", f"up{rail}{switch}", "master", f"sw{rail}{switch}", "up")
            for node in range(self.nodes):
                outer = f"c{rail}n{node}"
                run("ip", "-n", self.hub, "link", "add", outer, "type", "veth", "peer", "name", f"rail{rail}", "netns", self.node(node))
                run("ip", "-n", self.hub, "link", "set", outer, "master", f"sw{rail}{'b' if node in self.second else 'a'}", "up")
                run("ip", "-n", self.node(node), "addr", "add", f"10.{90 + rail}.0.{node + 1}/24", "dev", f"rail{rail}")
                run("ip", "-n", self.node(node), "link", "set", f"rail{rail}", "up")
                self.limit(node, rail, LINE)

    def down(self) -> None:
        for name in (self.hub, *map(self.node, range(self.nodes))):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def limit(self, node: int, rail: int, megabits: int, *, sending: bool = True, receiving: bool = True) -> None:
        if sending:
            self._shape(self.node(node), f"rail{rail}", megabits)
        if receiving:
            self._shape(self.hub, f"c{rail}n{node}", megabits)

    def limit_between_switches(self, rail: int, megabits: int) -> None:
        for switch in ("a", "b"):
            self._shape(self.hub, f"up{rail}{switch}", megabits)

    def _shape(self, namespace: str, link: str, megabits: int) -> None:
        rate = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "20ms"]
        run("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", "tbf", *rate)

    def measure(self, seconds: float = 0.4) -> PairsMeasured:
        places = {n: ProcessPlace(f"host lab{n}", ("chrt", "--rr", "1", "ip", "netns", "exec", self.node(n))) for n in range(self.nodes)}
        names = {node: f"lab{node}" for node in places}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(netrates, "seconds_each", lambda nodes, rails: seconds)
            return asyncio.run(netrates.measure_pairs(places, names, Way(line_gbs=LINE / 1000), lambda _: None))


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    nodes, rails, *second = request.param
    own = Lab(nodes, rails, *second)
    try:
        own.up()
        yield own
    finally:
        own.down()


def told(findings: Sequence[Finding]) -> list[str]:
    return [f"{one.subject} {one.message.partition(':')[0]}" for one in findings]


@pytest.mark.parametrize("lab", [(4, 2)], indirect=True)
def test_one_slow_cable_is_named_and_nothing_falsely(lab: Lab) -> None:
    healthy = lab.measure()
    assert judge_pairs(healthy, 0.7) == [] and below(healthy, 0.7) == []
    assert sorted(rail.name for rail in healthy.rails) == ["rail0", "rail1"]
    assert [rate for rate in healthy.rates if not 0.7 <= (rate.share or 0) < 1.25] == []

    lab.limit(2, 1, SLOW)
    slow = lab.measure()
    assert told(judge_pairs(slow)) == ["rail1 lab2 (rail1)"]
    assert {(rate.rail, 2 in (rate.sender, rate.receiver)) for rate in below(slow, 0.7)} == {("rail1", True)} and len(below(slow, 0.7)) == 6

    lab.limit(2, 1, LINE, receiving=False)
    (finding,) = judge_pairs(lab.measure())
    assert "of the line rate from 3 other nodes" in finding.message

    lab.limit(2, 1, LINE)
    assert judge_pairs(lab.measure(), 0.7) == []


@pytest.mark.parametrize("lab", [(3, 1)], indirect=True)
def test_a_cable_that_is_cut_fails_with_what_the_kernel_says(lab: Lab) -> None:
    run("ip", "-n", lab.hub, "link", "set", "c0n1", "down")
    measured = lab.measure()
    assert told(judge_pairs(measured)) == ["rail0 lab1 (rail0)"]
    assert all(rate.error for rate in measured.rates if 1 in (rate.sender, rate.receiver))
    assert not any(rate.error for rate in measured.rates if 1 not in (rate.sender, rate.receiver))


@pytest.mark.parametrize("lab", [(4, 1, (2, 3))], indirect=True)
def test_a_slow_link_between_switches_is_told_by_its_groups(lab: Lab) -> None:
    lab.limit_between_switches(0, SLOW)
    measured = lab.measure()
    (finding,) = judge_pairs(measured)
    assert "between the groups [lab0, lab1] and [lab2, lab3]" in finding.message


@pytest.mark.parametrize("lab", [(3, 2)], indirect=True)
def test_a_rail_that_is_slow_everywhere_is_one_finding(lab: Lab) -> None:
    for node in range(3):
        lab.limit(node, 0, SLOW)
    (finding,) = judge_pairs(lab.measure())
    assert finding.subject == "rail0" and finding.message.startswith("the rail is slow everywhere")
