"""Measurements of every pair of nodes on every rail: their schedule, and where they place the fault (pure).

In a round each node talks to one other node at most, so no measurement takes bandwidth from another: n nodes need n - 1 rounds. A node
whose cable is bad is slow with everybody; a bad link between switches is slow between two groups; a bad rail is slow everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lockstep.plan.cluster.finding import Finding, failed, warning
from lockstep.plan.cluster.hardware import MeasuredRail, NodeHardware
from lockstep_spec.words import number_of

BUDGET_SECONDS = 240.0
"""Seconds that the measurements of all pairs may take together."""
LEAST_SECONDS, MOST_SECONDS = 0.25, 2.0
STREAMS = 4
PERFTEST, SOCKETS = "ib_write_bw", "sockets"
SLOW_PART = 0.7
"""Part of the rail's usual rate below which a pair is slow, and of the line rate below which a rail is."""
FULL_PART = 0.9
"""Part of its cores that a node may use before its processor counts as the limit."""
SPEED_DIFFERS = 1.5
Pair = tuple[int, int]


@dataclass(frozen=True)
class Way:
    """Choices about a measurement, by the cluster file and a person."""

    rdma: bool = False
    """Measure RDMA by ib_write_bw where every node has it and an RDMA device; else sockets, which is said."""
    line_gbs: float | None = None
    """Line rate in Gb/s where ports state none, as virtual ones do."""
    gid_index: int | None = None
    ports: tuple[int, int] = (0, 0)
    """Range of ports to listen on; (0, 0): any free one."""


def rounds(nodes: Sequence[int]) -> list[list[Pair]]:
    """Rounds of disjoint pairs in which each pair of nodes comes once: a tournament by the circle method."""
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    schedule = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        schedule.append([(one, other) for one, other in facing if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule


def seconds_each(nodes: int, rails: int) -> float:
    """Seconds of one measurement, so that all of them, in both directions, keep to the budget."""
    count = 2 * max(1, rails) * max(1, nodes - 1 + nodes % 2)
    return max(LEAST_SECONDS, min(MOST_SECONDS, BUDGET_SECONDS / count))


@dataclass(frozen=True)
class PairRate:
    """One measurement: from one node to another, over one rail."""

    rail: str
    sender: int
    receiver: int
    gbs: float = 0.0
    """Decimal Gb/s that arrived."""
    line_gbs: float | None = None
    error: str = ""
    """Reason that nothing was measured; '' if it was."""
    microseconds: int | None = None
    """Round trip of one byte."""
    sender_cores: float | None = None
    """Processors that the sender kept busy."""
    is_bound: bool = True
    """False where the kernel chose the interface by the address alone."""

    @property
    def share(self) -> float | None:
        """Part of the line rate; None where nobody knows that."""
        return None if not self.line_gbs else self.gbs / self.line_gbs


@dataclass(frozen=True)
class PairsMeasured:
    """Results of a measurement of all pairs."""

    names: Mapping[int, str]
    """Node → name that people know it by."""
    nodes: Mapping[int, NodeHardware]
    rails: tuple[MeasuredRail, ...]
    rates: tuple[PairRate, ...]
    over: str
    """Tool that measured: sockets, or ib_write_bw."""

    @property
    def by_rdma(self) -> bool:
        return self.over == PERFTEST

    def of_rail(self, rail: str) -> list[PairRate]:
        return [rate for rate in self.rates if rate.rail == rail]

    def worst(self) -> list[PairRate]:
        """All measurements, the slowest part of its line rate first, then by rate."""
        return sorted(self.rates, key=lambda rate: (rate.share if rate.share is not None else 1.0, rate.gbs))

    def least_gbs(self) -> float:
        """Gb/s that even the slowest pair reaches, which is the pace of a ring over all nodes."""
        return self._together([min((rate.gbs for rate in self.of_rail(rail.name)), default=0.0) for rail in self.rails])

    def usual_gbs(self) -> float:
        """Gb/s that good pairs reach."""
        return self._together([usual_gbs(self.of_rail(rail.name)) for rail in self.rails])

    def _together(self, rails: Sequence[float]) -> float:
        """RDMA uses all rails at once; a job over sockets takes one network."""
        return sum(rails) if self.by_rdma else max(rails, default=0.0)


def usual_gbs(rates: Sequence[PairRate]) -> float:
    """Rate of a rail's good pairs: what a sixth of them reaches, so that up to half of the nodes may be slow."""
    return _of_the_good([rate.gbs for rate in rates if not rate.error])


def _of_the_good(values: Sequence[float]) -> float:
    return sorted(values)[-max(1, len(values) // 6)] if values else 0.0


def slow_pairs(rates: Collection[PairRate]) -> set[Pair]:
    """Directed pairs of a rail that failed, or are slow by what its good pairs reach."""
    usual = usual_gbs([*rates])
    return {(rate.sender, rate.receiver) for rate in rates if rate.error or rate.gbs < SLOW_PART * usual}


def below(measured: PairsMeasured, share: float) -> list[PairRate]:
    """Measurements below that part of the line rate; where nobody knows that, of the rail's usual rate."""
    usual = {rail.name: usual_gbs(measured.of_rail(rail.name)) for rail in measured.rails}
    return [rate for rate in measured.worst() if rate.error or rate.gbs < share * (rate.line_gbs or usual[rate.rail])]


@dataclass(frozen=True)
class Blame:
    """Nodes that explain measurements which failed or are slow."""

    nodes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    """Groups between which all is slow; () unless that is the explanation."""
    sends: bool = True
    receives: bool = True
    """For a single node: the directions that are slow."""


def blamed(slow: Collection[Pair], measured: Collection[Pair]) -> list[Blame]:
    """Smallest explanation of the slow directed pairs: groups of nodes, then single nodes, then what is left, pair by pair."""
    left, everyone = set(slow), sorted({node for pair in measured for node in pair})
    blames = []
    groups = _groups(left, measured, everyone)
    if groups:
        blames.append(Blame(tuple(sorted(node for group in groups for node in group)), groups))
        home = {node: group for group in groups for node in group}
        left = {pair for pair in left if not home.keys() >= set(pair) or home[pair[0]] == home[pair[1]]}
    innocent = set(everyone)
    while (worst := _worst(left, measured, innocent)) is not None:
        node, sends, receives = worst
        blames.append(Blame((node,), sends=sends, receives=receives))
        left = {pair for pair in left if node not in pair}
        innocent.discard(node)
    for pair in sorted({(min(pair), max(pair)) for pair in left}):
        blames.append(Blame(pair, sends=pair in left, receives=pair[::-1] in left))
    return blames


def _groups(slow: set[Pair], measured: Collection[Pair], everyone: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of two nodes or more that are fast inside and slow to each other; () if the nodes don't fall apart so.

    A node that is slow with everybody is in none.
    """
    home = {node: node for node in everyone}
    for one, other in measured:
        if (one, other) not in slow and (other, one) not in slow and home[one] != home[other]:
            home = {node: home[one] if group == home[other] else group for node, group in home.items()}
    groups = tuple(tuple(node for node in everyone if home[node] == group) for group in sorted(set(home.values())))
    several = tuple(group for group in groups if len(group) > 1)
    return several if len(several) > 1 else ()


def _worst(slow: set[Pair], measured: Collection[Pair], innocent: set[int]) -> tuple[int, bool, bool] | None:
    """Node that is slow with more than half of the others, by sending or by receiving; None: nobody is, or it can't be told from its
    peer.
    """

    def part(node: int, end: int) -> float:
        pairs = [pair for pair in measured if pair[end] == node and pair[1 - end] in innocent]
        return sum(pair in slow for pair in pairs) / len(pairs) if len(pairs) > 1 else 0.0

    parts = {node: (part(node, 0), part(node, 1)) for node in sorted(innocent)}
    node = max(parts, key=lambda node: (max(parts[node]), sum(parts[node])), default=None)
    if node is None or max(parts[node]) <= 0.5:
        return None
    return node, parts[node][0] > 0.5, parts[node][1] > 0.5


def judge_pairs(measured: PairsMeasured, stated: float | None = None) -> list[Finding]:
    """Say where the network is slow or broken, and what to look at. [] for a network whose pairs are alike and near the line rate.

    `stated`: part of the line rate that a person asks for; it replaces SLOW_PART for whole rails.
    """
    findings: list[Finding] = []
    blames: dict[int, list[str]] = {}
    for rail in measured.rails:
        rates = {(rate.sender, rate.receiver): rate for rate in measured.of_rail(rail.name)}
        findings += _whole_rail(measured, rail, list(rates.values()), stated or SLOW_PART)
        usual = usual_gbs(list(rates.values()))
        slow = slow_pairs(rates.values())
        if len(slow) == len(rates):
            continue
        for blame in blamed(slow, rates.keys()):
            findings.append(_explained(measured, rail, rates, blame, usual))
            if len(blame.nodes) == 1:
                blames.setdefault(blame.nodes[0], []).append(rail.name)
    findings += [*_everywhere(measured, blames), *_unbound(measured)]
    findings += [finding for rail in measured.rails for finding in _unlike_ports(measured, rail)]
    return findings


def _whole_rail(measured: PairsMeasured, rail: MeasuredRail, rates: list[PairRate], least: float) -> Iterator[Finding]:
    if not rates:
        return
    if all(rate.error for rate in rates):
        message = f"no node reaches another over this rail: {rates[0].error}"
        yield failed(rail.name, message, "look at its switch and VLAN, at firewalls of the nodes, and at routes between their addresses")
        return
    shares = [rate.share for rate in rates if rate.share is not None and not rate.error]
    if not shares or _of_the_good(shares) >= least:
        return
    usual = usual_gbs(rates)
    line = max(rate.line_gbs or 0.0 for rate in rates)
    full = [rate for rate in rates if _processor_full(measured, rate)]
    message = f"the rail is slow everywhere: {gigabits(usual)} Gb/s, {_of_the_good(shares):.0%} of the line rate {gigabits(line)} Gb/s"
    mtus = sorted({end.mtu for end in rail.ends.values() if end.mtu is not None})
    if len(full) * 2 > len(rates):
        fix = "the nodes' processors are the limit, not the network: give the pods more cores, or use RDMA"
    elif len(mtus) == 1 and mtus[0] < 9000:
        fix = f"its MTU is {mtus[0]}: set 9000 on nodes and switch; then look at the switch's ports and limits (ethtool, tc qdisc show)"
    else:
        fix = "look at its switch: port speeds, buffers, pause frames, limits (ethtool, mlnx_qos -i, tc qdisc show)"
    yield warning(rail.name, message, fix)


def _processor_full(measured: PairsMeasured, rate: PairRate) -> bool:
    cores = measured.nodes[rate.sender].cores if rate.sender in measured.nodes else None
    return bool(cores and rate.sender_cores is not None and rate.sender_cores >= FULL_PART * min(cores, STREAMS))


def _explained(measured: PairsMeasured, rail: MeasuredRail, rates: Mapping[Pair, PairRate], blame: Blame, usual: float) -> Finding:
    names = measured.names
    if blame.groups:
        home = {node: group for group in blame.groups for node in group}
        crossing = [rate for pair, rate in rates.items() if home.keys() >= set(pair) and home[pair[0]] != home[pair[1]]]
        groups = " and ".join(f"[{', '.join(names[node] for node in group)}]" for group in blame.groups)
        message = f"{_speed(crossing)} between the groups {groups}, {gigabits(usual)} Gb/s inside of them"
        return _finding(crossing, rail.name, message, "look at the link between their switches: its ports, its aggregation, its load")
    if len(blame.nodes) == 1:
        node = blame.nodes[0]
        concerned = [
            rate for (sender, receiver), rate in rates.items() if (blame.sends and sender == node) or (blame.receives and receiver == node)
        ]
        way = "to and from" if blame.sends and blame.receives else "to" if blame.sends else "from"
        message = (
            f"{names[node]} ({_port_name(rail, node)}): {_speed(concerned)} {way} "
            f"{number_of(len(rail.ends) - 1, 'other node')}; the other pairs {gigabits(usual)} Gb/s"
        )
        return _finding(concerned, rail.name, message, _node_fix(measured, rail, node, concerned))
    one, other = blame.nodes
    concerned = [
        rates[pair] for pair, is_slow in (((one, other), blame.sends), ((other, one), blame.receives)) if is_slow and pair in rates
    ]
    way = "and" if blame.sends and blame.receives else "to"
    first, second = (one, other) if blame.sends else (other, one)
    ports = f"{names[first]} ({_port_name(rail, first)}) {way} {names[second]} ({_port_name(rail, second)})"
    rest = f"; the other pairs {gigabits(usual)} Gb/s" if len(rates) > 2 else f", {gigabits(usual)} Gb/s the other way"
    fix = "only this pair is slow: look at the path between them (switch ports, routes, link aggregation), then at both cables"
    return _finding(concerned, rail.name, f"{ports}: {_speed(concerned)}{rest}", fix)


def _finding(rates: Sequence[PairRate], rail: str, message: str, fix: str) -> Finding:
    return failed(rail, message, fix) if any(rate.error for rate in rates) else warning(rail, message, fix)


def _speed(rates: Sequence[PairRate]) -> str:
    """Rates in words: measured, and of the line rate; or the error."""
    error = next((rate.error for rate in rates if rate.error), "")
    if error:
        return f"no data ({error})"
    typical = median(rate.gbs for rate in rates)
    shares = [rate.share for rate in rates if rate.share is not None]
    return f"{gigabits(typical)} Gb/s{f', {median(shares):.0%} of the line rate' if shares else ''}"


def _port_name(rail: MeasuredRail, node: int) -> str:
    end = rail.ends[node]
    return end.hca or end.interface


def _node_fix(measured: PairsMeasured, rail: MeasuredRail, node: int, rates: Sequence[PairRate]) -> str:
    end = rail.ends[node]
    if any(rate.error for rate in rates):
        return f"look at its firewall, and at cable and port of {end.interface}: ip -s link show {end.interface}"
    if any(_processor_full(measured, rate) for rate in rates if rate.sender == node):
        return f"its processor is the limit ({measured.nodes[node].cores:g} cores): look for other load, a CPU limit, the governor"
    speeds = sorted(other.gbs for other in rail.ends.values() if other.gbs is not None)
    if end.gbs is not None and speeds and speeds[-1] > end.gbs * SPEED_DIFFERS:
        return (
            f"its port runs at {gigabits(end.gbs)} Gb/s, others at {gigabits(speeds[-1])}: another cable or switch port, or"
            " auto-negotiation"
        )
    if end.wireless:
        return f"{end.interface} is wireless: use a cable"
    if end.hca:
        return (
            f"look at its cable and port: ibstat {end.hca}, error counters (perfquery), limits (mlnx_qos -i); try another cable or switch"
            " port"
        )
    return (
        f"look at its cable and port: ethtool {end.interface} (speed, duplex), ethtool -S {end.interface} | grep -i err, "
        f"tc qdisc show dev {end.interface}; try another cable or switch port"
    )


def _everywhere(measured: PairsMeasured, blames: Mapping[int, Sequence[str]]) -> Iterator[Finding]:
    """Nodes that are slow on each of several rails: no cable explains that."""
    for node, rails in blames.items():
        if len(rails) == len(measured.rails) > 1:
            message = f"{measured.names[node]} is slow on all {len(rails)} rails"
            fix = "not a cable: look at its PCIe slots (lspci -vv: LnkSta), IOMMU, processor governor and other load"
            yield warning(measured.names[node], message, fix)


def _unbound(measured: PairsMeasured) -> Iterator[Finding]:
    nodes = sorted({measured.names[rate.sender] for rate in measured.rates if not rate.is_bound})
    if nodes and len(measured.rails) > 1:
        message = (
            f"on {', '.join(nodes[:8])} only addresses choose the interface, so rails that share a subnet may have been measured as one"
        )
        yield warning("rails", message, "give each rail a subnet of its own, or use a kernel of 5.7 or newer")


def _unlike_ports(measured: PairsMeasured, rail: MeasuredRail) -> Iterator[Finding]:
    mtus = {node: end.mtu for node, end in rail.ends.items() if end.mtu is not None}
    if len(set(mtus.values())) > 1:
        usual = max(mtus.values(), key=lambda mtu: (sum(other == mtu for other in mtus.values()), mtu))
        odd = ", ".join(f"{measured.names[node]} {mtu}" for node, mtu in mtus.items() if mtu != usual)
        yield warning(rail.name, f"MTUs differ: {odd}, the others {usual}", "give all ports of the rail, and its switch, one MTU")


def gigabits(value: float) -> str:
    """Gb/s with three significant digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
