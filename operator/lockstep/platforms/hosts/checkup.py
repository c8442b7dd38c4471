"""Look at every host for `doctor`, then let all knock at each other, and measure between neighbors. It changes nothing on a host."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.hosts import Host
from lockstep.plan.cluster.hardware import MeasuredRail, NodeHardware, RailEnd
from lockstep.plan.cluster.pairs import Pair, PairRate
from lockstep.plan.hosts.condition import HostCondition, HostLook, Knock, read_condition
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.place import BLOCK, addresses_of, free_block
from lockstep.plan.hosts.reach import HostNetwork, is_slow, ring
from lockstep.platforms.hosts.fleet import ENVIRONMENT_PYTHON, Fleet, old_source_of
from lockstep.platforms.inpod import netrate
from lockstep.platforms.inpod.netfacts import TEXT_MAX
from lockstep.platforms.jobs.netrates import NodeProgram, network_programs, read_nodes, socket_rate
from lockstep.platforms.onhost import condition as condition_program
from lockstep.programs import ProgramFailed, answer_of, python_output

CONDITION_SECONDS = 60.0
KNOCK_SECONDS = 3.0
RATE_SECONDS = 0.3
"""Seconds of each measurement between neighbors."""
now = time.time
AGAIN, AGAIN_SECONDS = 2, 1.0
PURPOSES = ("coordinator", "rendezvous", "any")


async def look_at(
    fleet: Fleet, hosts: Sequence[Host], job: str = "", inputs: Mapping[str, list[list[str]]] | None = None
) -> list[HostLook]:
    """Ask all hosts at once, in the order given. A host that doesn't answer is one look among others.

    `inputs`: what the job needs on each, as `plan.hosts.place.inputs_of` gives it, to look for it there.
    """

    async def one(name: str) -> HostLook:
        host = fleet.cluster.host(name)
        await fleet.shared(name).open()
        asked = now()
        (noise, seconds), (answers, problems), condition = await asyncio.gather(
            _begin(fleet, name),
            fleet.look([name], job=job, paths=inputs, starts=True),
            _condition(fleet, host),
        )
        heard = now()
        if problems:
            raise Failed(problems[name])
        facts = answers[name]
        ahead, behind = facts.now - heard, facts.now - asked
        return HostLook(host, facts, condition, noise=noise, seconds=seconds, clock_seconds=max(0.0, ahead) + min(0.0, behind))

    looks, problems = await fleet.all([host.name for host in hosts], one)
    return [looks.get(host.name) or HostLook(host, problem=problems[host.name]) for host in hosts]


async def _begin(fleet: Fleet, name: str) -> tuple[str, float]:
    """Output of the login shell before a program, and the seconds to the start of one over the open connection."""
    start = time.monotonic()
    async with fleet.place(name).program(["true"]) as program:
        return program.noise, time.monotonic() - start


async def _condition(fleet: Fleet, host: Host) -> HostCondition:
    place = fleet.place(host.name)
    request = {"python": host.python or ENVIRONMENT_PYTHON}
    text = await python_output(place, old_source_of(condition_program), json.dumps(request), seconds=CONDITION_SECONDS)
    return read_condition(host.name, answer_of(text, place.name))


async def measure_between(fleet: Fleet, looks: Sequence[HostLook]) -> HostNetwork | None:
    """Knock from every host at every other one, and measure between neighbors. None: fewer than two hosts take part, or addresses are not
    known.

    Raises ConfigError where addresses can't be determined, ProgramFailed where a host's program ends.
    """
    known: dict[int, tuple[Host, HostFacts]] = {
        number: (look.host, look.facts) for number, look in enumerate(looks) if look.facts is not None
    }
    if len(known) < 2:
        return None
    facts = {host.name: answer for host, answer in known.values()}
    addresses = dict(zip(known, addresses_of([host for host, _ in known.values()], facts), strict=True))
    names = {number: host.name for number, (host, _) in known.items()}
    places = {number: fleet.place(name) for number, name in names.items()}
    async with network_programs(places) as programs:
        hardware = await read_nodes(programs)
        token = secrets.token_hex(netrate.TOKEN_BYTES)
        ports, deaf = await _listen(programs, token, addresses, _first_port(fleet, list(facts.values())))
        knocks = await _knock(programs, token, addresses, ports, deaf)
        ends = {number: _end(hardware[number], addresses[number]) for number in programs}
        silent = {(knock.sender, knock.receiver) for knock in knocks if knock.reason}
        rates = await _measure(programs, token, MeasuredRail("hosts", ends), {number: ports[number][-1] for number in ports}, silent)
    firewalls = {number: look.condition.firewall for number, look in enumerate(looks) if look.condition is not None}
    return HostNetwork(names, ends, firewalls, deaf, knocks, rates)


def _first_port(fleet: Fleet, facts: Sequence[HostFacts]) -> int:
    """First port of the block that a job started now would get; 0 where none is free, which is a finding of its own."""
    try:
        return free_block(fleet.cluster, facts)
    except ConfigError:
        return 0


async def _listen(
    programs: Mapping[int, NodeProgram], token: str, addresses: Mapping[int, str], first: int
) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Let all listen where a job's coordinator and ranks would, and on a port of the kernel's choice. Return the ports, and who can't, with
    why.
    """
    ports: dict[int, list[int]] = {}
    deaf: dict[int, str] = {}

    async def one(number: int) -> None:
        own = []
        for offset, _ in enumerate(PURPOSES[:-1]):
            wanted = (first + offset, first + BLOCK - 1) if first else (0, 0)
            own.append(await _port(programs[number], token, addresses[number], wanted))
        own.append(await _port(programs[number], token, addresses[number], (0, 0)))
        bad = [answer for answer in own if not isinstance(answer, int)]
        if bad:
            deaf[number] = bad[0]
        else:
            ports[number] = [int(answer) for answer in own]

    await asyncio.gather(*map(one, programs))
    return ports, deaf


async def _port(program: NodeProgram, token: str, address: str, ports: tuple[int, int]) -> int | str:
    answer = await program.ask("listen", token=token, addresses=[address], ports=ports)
    value = (answer.get("ports") or {}).get(address)
    return value if isinstance(value, int) else str(value)[:TEXT_MAX]


async def _knock(
    programs: Mapping[int, NodeProgram],
    token: str,
    addresses: Mapping[int, str],
    ports: Mapping[int, Sequence[int]],
    deaf: Mapping[int, str],
) -> list[Knock]:
    async def one(sender: int) -> list[Knock]:
        targets = [
            (receiver, port, purpose)
            for receiver in ports
            if receiver != sender
            for port, purpose in zip(ports[receiver], PURPOSES, strict=True)
        ]
        answer = await programs[sender].ask(
            "knock",
            token=token,
            source=addresses[sender],
            targets=[[addresses[receiver], port] for receiver, port, _ in targets],
            seconds=KNOCK_SECONDS,
        )
        reasons = answer.get("reasons")
        if not isinstance(reasons, list) or len(reasons) != len(targets):
            raise ProgramFailed(f"{programs[sender].name} answers {str(answer)[:100]!r}, which says nothing of its knocks")
        return [
            Knock(sender, receiver, port, purpose, str(reason)[:TEXT_MAX])
            for (receiver, port, purpose), reason in zip(targets, reasons, strict=True)
        ]

    by_sender = await asyncio.gather(*(one(sender) for sender in programs if sender not in deaf))
    return [knock for knocks in by_sender for knock in knocks]


def _end(hardware: NodeHardware, address: str) -> RailEnd:
    """Port of a host that has this address; one without a name where none has it."""
    port = next((port for port in hardware.ports if port.address == address), None)
    return RailEnd("", address) if port is None else port.end


async def _measure(
    programs: Mapping[int, NodeProgram], token: str, rail: MeasuredRail, ports: Mapping[int, int], silent: set[Pair]
) -> list[PairRate]:
    """Rates between neighbors of the ring, both ways at once, as a ring's traffic is; of those alone that reach each other."""
    rates: list[PairRate] = []
    for pairs in ring(sorted(ports)):
        chosen = [pair for pair in (*pairs, *(pair[::-1] for pair in pairs)) if pair not in silent]
        rates += await asyncio.gather(*(socket_rate(programs, token, rail, pair, ports[pair[1]], RATE_SECONDS) for pair in chosen))
    return [await _again(programs, token, rail, rate, ports) if rate.error or is_slow(rate) else rate for rate in rates]


async def _again(programs: Mapping[int, NodeProgram], token: str, rail: MeasuredRail, rate: PairRate, ports: Mapping[int, int]) -> PairRate:
    """Measure a pair that seems slow again, by itself and for longer: a host that is busy misses a short measurement. Return the best."""
    for _ in range(AGAIN):
        pair = (rate.sender, rate.receiver)
        other = await socket_rate(programs, token, rail, pair, ports[pair[1]], AGAIN_SECONDS)
        rate = max(rate, other, key=lambda one: (not one.error, one.gbs))
        if not rate.error and not is_slow(rate):
            break
    return rate
