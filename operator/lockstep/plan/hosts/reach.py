"""Judgments of `doctor` about the network between hosts: who reaches whom on which ports, MTUs, and how fast (pure).

What fails with many is explained by the host that it has in common, as for measured pairs; each finding names the hosts, and the rule that
root adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.plan.cluster.finding import Finding, failed, warning
from lockstep.plan.cluster.hardware import RailEnd
from lockstep.plan.cluster.pairs import Blame, Pair, PairRate, blamed, gigabits
from lockstep.plan.hosts.condition import Knock
from lockstep_spec.words import clauses, listed

SLOW_GBS = 0.5
"""Rate of a gigabit network that something holds up; below it a step of a small adapter already takes seconds."""
SLOW_PART = 0.5
"""Part of its ports' line rate that a pair should reach in a short measurement."""
FAST_GBS = 5.0
"""Rate that is fast enough whatever the ports could do: processors and load decide above."""


@dataclass(frozen=True)
class HostNetwork:
    """Measurements between hosts. Hosts are numbered in the order of the file."""

    names: Mapping[int, str]
    ends: Mapping[int, RailEnd]
    """Port of each host on the network that connects them."""
    firewalls: Mapping[int, str]
    """Tool by which each host's firewall is kept, as `Condition.firewall` has it."""
    deaf: Mapping[int, str]
    """Hosts that can't listen on their address → why."""
    knocks: Sequence[Knock]
    rates: Sequence[PairRate]

    @property
    def slowest_gbs(self) -> float | None:
        """Rate of the slowest pair that was measured; None: none was."""
        return min((rate.gbs for rate in self.rates if not rate.error), default=None)


def ring(nodes: Sequence[int]) -> list[list[Pair]]:
    """Rounds of disjoint pairs of neighbors, in which each pair of the ring comes once."""
    if len(nodes) < 2:
        return []
    pairs = [(one, other) for one, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True)]
    pairs = pairs[: 1 if len(nodes) == 2 else None]
    last = [pairs.pop()] if len(pairs) % 2 and len(pairs) > 1 else []
    return [part for part in (pairs[::2], pairs[1::2], last) if part]


def network_findings(network: HostNetwork, stated_mtu: int | None) -> list[Finding]:
    """Judge what was measured. `stated_mtu`: network.mtu of the cluster file."""
    return [*_deaf(network), *_unreached(network), *_mtus(network, stated_mtu), *_rates(network)]


def _deaf(network: HostNetwork) -> Iterator[Finding]:
    for node, reason in network.deaf.items():
        fix = "state the address by which the other hosts reach it in hosts[].address"
        yield failed(network.names[node], f"{reason}: none of its interfaces has this address", fix)


def _unreached(network: HostNetwork) -> Iterator[Finding]:
    measured = {(knock.sender, knock.receiver) for knock in network.knocks}
    by_purpose: dict[str, set[Pair]] = {}
    for knock in network.knocks:
        by_purpose.setdefault(knock.purpose, set())
        if knock.reason:
            by_purpose[knock.purpose].add((knock.sender, knock.receiver))
    alike: dict[frozenset[Pair], list[str]] = {}
    for purpose, pairs in by_purpose.items():
        alike.setdefault(frozenset(pairs), []).append(purpose)
    for failing, purposes in alike.items():
        for blame in blamed(failing, measured) if failing else ():
            yield _unreachable(network, blame, failing, purposes)


def _unreachable(network: HostNetwork, blame: Blame, failing: frozenset[Pair], purposes: Sequence[str]) -> Finding:
    names = network.names
    pairs = [pair for pair in sorted(failing) if _is_of(blame, pair)]
    knocks = [knock for knock in network.knocks if knock.reason and (knock.sender, knock.receiver) in pairs and knock.purpose in purposes]
    blocked = [(one.port, one.purpose) for one in knocks if (one.sender, one.receiver) == pairs[0]]
    ports = ", ".join(f"{port} ({'any other' if purpose == 'any' else purpose})" for port, purpose in blocked)
    reasons = clauses(sorted({knock.reason for knock in knocks}))
    words = f"port{'s' if ', ' in ports else ''} {ports}: {reasons}"
    subject, both = _subject(network, blame, pairs), blame.sends and blame.receives
    if blame.groups:
        message = f"these groups don't reach each other on {words}"
        return failed(subject, message, "look at what is between them: switches, VLANs, routers and their rules")
    if len(blame.nodes) == 1:
        node, others = blame.nodes[0], _others(blame, pairs)
        if both:
            return failed(subject, f"{words}, both ways", f"{_let_in(network, node, others)}; and let out what goes there")
        if blame.receives:
            return failed(subject, words, _let_in(network, node, others))
        message = f"{words}, while others are reached there: {names[node]}'s own firewall stops what goes out"
        return failed(subject, message, _let_out(network, node, others))
    sender, receiver = blame.nodes if blame.sends else blame.nodes[::-1]
    back = f"; {_let_in(network, sender, [receiver])}" if both else f"; if that changes nothing, {names[sender]} must let it out"
    return failed(subject, words, _let_in(network, receiver, [sender]) + back)


def _others(blame: Blame, pairs: Iterable[Pair]) -> list[int]:
    """Return the hosts at the other end of these pairs of the one that is to blame."""
    return sorted({end for pair in pairs for end in pair} - set(blame.nodes))


def _subject(network: HostNetwork, blame: Blame, pairs: Sequence[Pair]) -> str:
    """Name what these pairs are explained by: groups, a host with those at the other end, or two hosts."""
    names, arrow = network.names, "↔" if blame.sends and blame.receives else "→"
    if blame.groups:
        return " and ".join(f"[{', '.join(names[node] for node in group)}]" for group in blame.groups)
    if len(blame.nodes) == 1:
        ends = [names[blame.nodes[0]], listed([names[other] for other in _others(blame, pairs)])]
    else:
        ends = [names[node] for node in blame.nodes]
    return f" {arrow} ".join(ends if blame.sends else ends[::-1])


def _is_of(blame: Blame, pair: Pair) -> bool:
    """Return True if the blame explains this pair."""
    sender, receiver = pair
    if blame.groups:
        home = {node: group for group in blame.groups for node in group}
        return home.keys() >= {sender, receiver} and home[sender] != home[receiver]
    if len(blame.nodes) == 1:
        return (blame.sends and sender == blame.nodes[0]) or (blame.receives and receiver == blame.nodes[0])
    return set(pair) == set(blame.nodes)


def _let_in(network: HostNetwork, node: int, peers: Sequence[int]) -> str:
    """Root's commands on a host that let others in: all TCP, since NCCL and gloo take any port."""
    addresses = [network.ends[peer].address for peer in peers if peer in network.ends]
    tool = network.firewalls.get(node, "")
    if tool == "ufw":
        commands = [f"ufw allow from {address} to any proto tcp" for address in addresses]
    elif tool == "firewalld":
        commands = [*(f"firewall-cmd --permanent --zone=trusted --add-source={address}" for address in addresses), "firewall-cmd --reload"]
    else:
        version = "ip6" if any(":" in address for address in addresses) else "ip"
        commands = [f"nft insert rule inet filter input {version} saddr {{ {', '.join(addresses)} }} meta l4proto tcp accept"]
    shown = "; ".join(commands)
    return f"as root on {network.names[node]}: {shown}" + (
        "" if tool else " (or what its firewall calls this: nft list ruleset, iptables -S)"
    )


def _let_out(network: HostNetwork, node: int, peers: Sequence[int]) -> str:
    addresses = [network.ends[peer].address for peer in peers if peer in network.ends]
    tool = network.firewalls.get(node, "")
    if tool == "ufw":
        commands = "; ".join(f"ufw allow out to {address} proto tcp" for address in addresses)
    else:
        version = "ip6" if any(":" in address for address in addresses) else "ip"
        commands = f"nft insert rule inet filter output {version} daddr {{ {', '.join(addresses)} }} meta l4proto tcp accept"
    return f"as root on {network.names[node]}: {commands}" + ("" if tool == "ufw" else " (or what its firewall calls this)")


def _mtus(network: HostNetwork, stated: int | None) -> Iterator[Finding]:
    mtus = {node: end.mtu for node, end in network.ends.items() if end.mtu is not None}
    if not mtus:
        return
    counts = Counter(mtus.values())
    usual = stated or max(counts, key=lambda mtu: (counts[mtu], mtu == 1500))
    for node, mtu in mtus.items():
        if mtu != usual:
            rest = f"and network.mtu of the file is {stated}" if stated else f"and {usual} on the other hosts"
            interface, name = network.ends[node].interface, network.names[node]
            fix = (
                f"as root on {name}: ip link set dev {interface} mtu {usual}, and the same in its netplan or NetworkManager; the switch"
                " must carry it, too"
            )
            yield warning(name, f"the MTU of {interface} is {mtu}, {rest}", fix)


def _rates(network: HostNetwork) -> Iterator[Finding]:
    rates = {(rate.sender, rate.receiver): rate for rate in network.rates}
    silent = {(knock.sender, knock.receiver) for knock in network.knocks if knock.reason}
    for pair, rate in rates.items():
        if rate.error and pair not in silent:
            fix = "compare the MTU of both, and what switches and tunnels between them carry: ping -M do -s 1472"
            yield failed(_pair(network, pair), f"it connects, but data doesn't get through: {rate.error}", fix)
    measured = {pair: rate for pair, rate in rates.items() if not rate.error}
    slow = {pair for pair, rate in measured.items() if is_slow(rate)}
    best = max((rate.gbs for rate in measured.values()), default=0.0)
    for blame in blamed(slow, measured.keys()) if slow else ():
        yield _slow(network, blame, [measured[pair] for pair in sorted(slow) if _is_of(blame, pair)], best)


def is_slow(rate: PairRate) -> bool:
    """Return True if it is less than any network for jobs has, or than what the ports of both ends promise."""
    return rate.gbs < max(SLOW_GBS, SLOW_PART * min(rate.line_gbs or 0.0, FAST_GBS))


def _slow(network: HostNetwork, blame: Blame, rates: Sequence[PairRate], best: float) -> Finding:
    worst = min(rates, key=lambda rate: rate.gbs)
    line = f" of {gigabits(worst.line_gbs)}" if worst.line_gbs else ""
    message = f"{gigabits(worst.gbs)}{line} Gb/s"
    if best > 2 * worst.gbs:
        message += f", and up to {gigabits(best)} between others"
    subject = _subject(network, blame, [(rate.sender, rate.receiver) for rate in rates])
    if blame.groups:
        return warning(subject, message, "look at the link between their switches")
    return warning(subject, message, _cable(network, blame.nodes))


def _pair(network: HostNetwork, pair: Pair) -> str:
    return f"{network.names[pair[0]]} → {network.names[pair[1]]}"


def _cable(network: HostNetwork, nodes: Sequence[int]) -> str:
    looks = "; ".join(
        (
            f"ethtool {end.interface}, tc qdisc show dev {end.interface} on {network.names[node]}"
            if not end.wireless
            else f"{network.names[node]} is wireless: use a cable"
        )
        for node in nodes
        if (end := network.ends.get(node)) is not None
    )
    return f"look at cable, port speed and limits: {looks}; a job's Stage1 with LoRA sends least"
