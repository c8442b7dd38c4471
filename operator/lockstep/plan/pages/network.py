"""Pages about a measured network: the worst pairs, a matrix of small networks, and the tree of a cluster's nodes, devices and rails
(pure).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from lockstep.api.objects import Object
from lockstep.plan.cluster.finding import Finding, note
from lockstep.plan.cluster.hardware import BusPlace, GpuPlace, Nearness, NodeHardware, nearness
from lockstep.plan.cluster.pairs import SLOW_PART, PairRate, PairsMeasured, gigabits, usual_gbs
from lockstep.plan.pages.table import aligned
from lockstep_spec.words import number_of, printable_line

SHOWN = 20
"""Pairs that the table has; the others are summed up in a line."""
MATRIX_NODES = 10
COLUMNS = ("FROM", "TO", "RAIL", "Gb/s", "OF LINE", "ROUND TRIP")
LEVELS = (
    ("topology.kubernetes.io/region", "region"),
    ("topology.kubernetes.io/zone", "zone"),
    ("topology.kubernetes.io/rack", "rack"),
    ("nvidia.com/gpu.clique", "NVLink domain"),
)
"""Labels of nodes that say which are near each other, outermost first."""


def pairs_page(measured: PairsMeasured) -> Iterator[str]:
    """The worst pairs first, then a line a rail, and matrices of networks of a few nodes."""
    worst = measured.worst()
    yield from aligned([COLUMNS, *(_cells(measured, rate) for rate in worst[:SHOWN])])
    rest = [rate for rate in worst[SHOWN:] if not rate.error]
    if rest:
        yield f"… and {number_of(len(rest), 'measurement')} of {gigabits(min(rate.gbs for rate in rest))} Gb/s or more (-o json has all)"
    for rail in measured.rails:
        rates = measured.of_rail(rail.name)
        yield ""
        yield _summary(measured, rail.name, rates)
        if 2 < len(rail.ends) <= MATRIX_NODES:
            yield from _matrix(measured, rates, sorted(rail.ends))


def _cells(measured: PairsMeasured, rate: PairRate) -> tuple[str, ...]:
    value = rate.error or gigabits(rate.gbs)
    share = "-" if rate.share is None or rate.error else f"{rate.share:.0%}"
    trip = "-" if rate.microseconds is None else f"{rate.microseconds} us"
    return measured.names[rate.sender], measured.names[rate.receiver], rate.rail, value, share, trip


def _summary(measured: PairsMeasured, rail: str, rates: Sequence[PairRate]) -> str:
    gone = [rate for rate in rates if not rate.error]
    if not gone:
        return f"rail {rail}: nothing arrived"
    shares = [rate.share for rate in gone if rate.share is not None]
    line = (
        f", {min(shares):.0%} to {max(shares):.0%} of the line rate"
        if shares
        else "; its line rate is not known (--line-rate GBPS states it)"
    )
    least, most = (gigabits(pick(rate.gbs for rate in gone)) for pick in (min, max))
    return f"rail {rail}: {least} to {most} Gb/s over {number_of(len(gone), 'measurement')} by {measured.over}{line}"


def _matrix(measured: PairsMeasured, rates: Sequence[PairRate], nodes: Sequence[int]) -> Iterator[str]:
    values = {(rate.sender, rate.receiver): "none" if rate.error else gigabits(rate.gbs) for rate in rates}
    rows = [["Gb/s from ↓ to →", *(measured.names[node] for node in nodes)]]
    rows += [[measured.names[sender], *(values.get((sender, receiver), "·") for receiver in nodes)] for sender in nodes]
    yield from aligned(rows)


def rail_lines(measured: PairsMeasured) -> Iterator[str]:
    """A line a rail: its nodes in the groups that are fast inside, its rates."""
    for rail in measured.rails:
        rates = measured.of_rail(rail.name)
        groups = near_groups(rates, sorted(rail.ends))
        yield _summary(measured, rail.name, rates)
        for group in groups if len(groups) > 1 else []:
            yield f"  near each other: {', '.join(measured.names[node] for node in group)}"


def near_groups(rates: Sequence[PairRate], nodes: Sequence[int]) -> list[list[int]]:
    """Nodes in groups, each connected by pairs that reach the rail's usual rate both ways."""
    usual = usual_gbs(rates)
    fast = {(rate.sender, rate.receiver) for rate in rates if not rate.error and rate.gbs >= SLOW_PART * usual}
    groups: list[list[int]] = []
    for node in nodes:
        near = [group for group in groups if any({(node, other), (other, node)} <= fast for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append(sorted([node, *(other for group in near for other in group)]))
    return sorted(groups)


def topology_findings(measured: PairsMeasured) -> Iterator[Finding]:
    """GPUs that are far from every NIC of their node."""
    for node, facts in sorted(measured.nodes.items()):
        gpus = far_gpus(facts)
        if gpus:
            listed = ", ".join(str(gpu.index) for gpu in gpus)
            message = f"GPUs {listed}: every NIC is on another NUMA node, so their traffic crosses the link between processors"
            yield note(measured.names[node], message, "put a NIC into a slot of their processor, if there is one")


def pairs_values(measured: PairsMeasured, *, hardware: bool = False) -> dict[str, Any]:
    """The same for scripts. `hardware`: with every node's devices."""
    return {
        **({"hardware": {measured.names[node]: asdict(facts) for node, facts in sorted(measured.nodes.items())}} if hardware else {}),
        "over": measured.over,
        "nodes": [{"node": node, "name": name, "host": measured.nodes[node].host} for node, name in sorted(measured.names.items())],
        "rails": [
            {
                "rail": rail.name,
                "usualGigabits": round(usual_gbs(measured.of_rail(rail.name)), 3),
                "ports": {measured.names[node]: {"interface": end.interface, "address": end.address, "lineGigabits": end.gbs,
                    "mtu": end.mtu,
                                                 **({"hca": end.hca} if end.hca else {})} for node, end in sorted(rail.ends.items())},
            }
            for rail in measured.rails
        ],
        "pairs": [
            {
                "rail": rate.rail, "from": measured.names[rate.sender], "to": measured.names[rate.receiver], "gigabits": round(rate.gbs, 4),
                "lineGigabits": rate.line_gbs, "share": None if rate.share is None else round(rate.share, 4),
                    "roundTripMicroseconds": rate.microseconds,
                **({"error": rate.error} if rate.error else {}),
            }
            for rate in measured.worst()
        ],
        "leastGigabits": round(measured.least_gbs(), 4),
    }  # fmt: skip


def tree(nodes: Mapping[int, NodeHardware], names: Mapping[int, str], labels: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Nodes below the places that their labels name, and each node's GPUs and NICs below the parts that they share.

    `labels`: of the cluster's nodes, by name; {} where nobody may see them, or there are none.
    """
    levels = [(key, word) for key, word in LEVELS if any(key in labels.get(name, {}) for name in names.values())]
    placed = sorted((tuple(labels.get(names[node], {}).get(key, "") for key, _ in levels), node) for node in nodes)
    before: tuple[str, ...] = ()
    for places, node in placed:
        for depth, ((_, word), value) in enumerate(zip(levels, places, strict=True)):
            if places[: depth + 1] != before[: depth + 1]:
                yield f"{'  ' * depth}{word} {value or '(no label)'}"
        before = places
        for line in _node(node, names[node], nodes[node]):
            yield f"{'  ' * len(levels)}{line}"


def _node(number: int, name: str, facts: NodeHardware) -> Iterator[str]:
    yield printable_line(f"node {number}: {name}")
    if facts.links and len(facts.gpus) > 1:
        yield f"  between its GPUs: {', '.join(facts.links)} (nvidia-smi topo -m)"
    devices = _devices(facts)
    real = sorted((device for device in devices if device[0].bus), key=_order)
    for numa, near in groupby(real, key=lambda device: device[0].numa):
        yield f"  NUMA node {numa}" if numa is not None else "  no NUMA node is known"
        for switch, together in groupby(near, key=lambda device: _switch(device[0])):
            yield f"    {f'PCI switch {switch}' if switch else 'no PCI switch'}: {', '.join(words for _, words in together)}"
    virtual = [words for place, words in devices if not place.bus]
    if virtual:
        yield f"  on no PCI bus: {', '.join(virtual)}"


def _devices(facts: NodeHardware) -> list[tuple[BusPlace, str]]:
    """Devices with their places, in words. A port that is an RDMA device's is named once."""
    rates = {hca.device: hca.gbs for hca in facts.hcas}
    devices = [(gpu.place, f"GPU {gpu.index}") for gpu in facts.gpus]
    for port in facts.ports:
        speed = rates.get(port.hca) or port.gbs
        also = f" ({port.hca})" if port.hca else ""
        devices.append((port.place, f"{port.name}{also}{f' {gigabits(speed)} Gb/s' if speed else ''}"))
    named = {port.hca for port in facts.ports}
    devices += [
        (hca.place, f"{hca.device}{f' {gigabits(hca.gbs)} Gb/s' if hca.gbs else ''}") for hca in facts.hcas if hca.device not in named
    ]
    return devices


def _order(device: tuple[BusPlace, str]) -> tuple[bool, int, str]:
    place, _ = device
    return place.numa is None, place.numa or 0, _switch(place)


def _switch(place: BusPlace) -> str:
    """Address of the switch's upstream port above the device; '' for a device on a root port."""
    return place.bus[1] if len(place.bus) > 2 else ""


def far_gpus(facts: NodeHardware) -> list[GpuPlace]:
    """GPUs with no NIC on their own NUMA node, on a node that has NICs there: their traffic crosses the sockets' link."""
    nics = [hca.place for hca in facts.hcas] or [port.place for port in facts.ports if port.place.bus]
    return [gpu for gpu in facts.gpus if nics and all(nearness(gpu.place, nic) is Nearness.FAR for nic in nics)]


def node_labels(nodes: Sequence[Object]) -> dict[str, dict[str, str]]:
    """Labels of nodes that say where they are, by the nodes' names."""
    wanted = {key for key, _ in LEVELS}
    labels: dict[str, dict[str, str]] = defaultdict(dict)
    for node in nodes:
        for key, value in (node["metadata"].get("labels") or {}).items():
            if key in wanted:
                labels[str(node["metadata"]["name"])][key] = printable_line(str(value))
    return labels
