"""The plan of a job on hosts: whether it could start there now, and whose GPUs have the memory that it needs (pure). No object of
Kubernetes is part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.api.quantity import number
from lockstep.plan.ahead.forecast import NOT_OFFLINE, Card, Forecast, RunFacts
from lockstep.plan.ahead.slownetwork import slowest
from lockstep.plan.cluster.finding import Finding, fine, note, refused, unknown
from lockstep.plan.hosts.facts import DIVIDED, HostFacts
from lockstep.plan.hosts.place import Seat, unlimited_lines
from lockstep.plan.render.resolved import Resolved
from lockstep_spec.words import listed, number_of

NOT_ASKED = "the hosts were not asked (--offline)"


@dataclass(frozen=True)
class HostsAsked:
    """Answers of a job's hosts before its start."""

    facts: Mapping[str, HostFacts]
    refusals: tuple[str, ...] = ()
    """Reasons why a start would be refused now."""
    seats: tuple[Seat, ...] = ()
    """The job's nodes; none where it can't start."""


def with_hosts(known: RunFacts, asked: HostsAsked) -> RunFacts:
    """Return the facts with what the hosts say of the devices and ranks that the job would have."""
    device = slowest(gpu.name for seat in asked.seats for gpu in seat.gpus(asked.facts[seat.host.name]))
    samples = tuple(seat.host.micro_batch or 0 for seat in asked.seats for _ in range(seat.record.ranks[seat.node]))
    return replace(known, cards=cards_of(asked), device=device, samples_at_once=samples)


def cards_of(asked: HostsAsked) -> tuple[Card, ...]:
    """Return the card of each host for one rank: its smallest GPU, or on CPUs a rank's part of the memory."""
    cards = []
    for seat in asked.seats:
        facts, micro_batch = asked.facts[seat.host.name], seat.host.micro_batch
        gpus = seat.gpus(facts)
        if gpus:
            smallest = min(gpus, key=lambda gpu: gpu.memory)
            size = smallest.memory // len(gpus) if smallest.shared else smallest.memory
            cards.append(Card(f"{seat.host.name}'s {smallest.name}", size, micro_batch, smallest.shared))
        elif facts.memory:
            ranks, stated = seat.record.ranks[seat.node], seat.resolved.spec.resources.memory
            own = 0 if "memory" in seat.unlimited else int(number(stated))
            part = "memory" if ranks == 1 else f"memory for each of {ranks} ranks"
            cards.append(Card(f"{seat.host.name}'s {part}", min(facts.memory, own or facts.memory) // ranks, micro_batch))
    return tuple(cards)


def room_of(asked: HostsAsked, shared: bool) -> int | None:
    """Free bytes of all workspaces together, of one where they are the same; None: no host was asked."""
    free = [asked.facts[seat.host.name].workspace.free for seat in asked.seats]
    return None if not free else min(free) if shared else sum(free)


def hosts_plan(resolved: Resolved, hosts: Sequence[str], asked: HostsAsked | None, estimate: Forecast) -> list[Finding]:
    """Everything that there is to say, in order. `hosts`: names of those that the job takes. `asked`: None offline."""
    name = resolved.profile.metadata.name
    message = (
        f"{resolved.name} on {listed(hosts)} of {name}: {number_of(resolved.nodes, 'node')}, {resolved.transport} between them, storage"
        f" {resolved.storage_mode.value}"
    )
    findings = [note("job", message)]
    if asked is None:
        findings.append(unknown("hosts", f"whether they can be reached, have the inputs and free GPUs: {NOT_ASKED}", NOT_OFFLINE))
    else:
        findings += [refused("hosts", reason) for reason in asked.refusals]
        findings += [fine("hosts", _seat(seat, asked.facts[seat.host.name])) for seat in asked.seats]
        findings += [note("hosts", line.removeprefix("warning: ")) for line in unlimited_lines(asked.seats)]
    return findings + estimate.findings


def _seat(seat: Seat, facts: HostFacts) -> str:
    ranks, gpus = seat.record.ranks[seat.node], seat.gpus(facts)
    names = [f"GPU {gpu.index} ({gpu.name}{', ' + DIVIDED if gpu.divided else ''})" for gpu in gpus]
    what = ", ".join(names) if gpus else number_of(ranks, "CPU rank")
    keeps = "" if not seat.record.supervised else "; it would not come back after a reboot"
    return f"{seat.host.name} is node {seat.node} at {seat.run.addresses[seat.node]}: {what}{keeps}"
