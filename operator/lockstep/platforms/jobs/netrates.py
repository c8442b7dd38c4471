"""Measure every pair of nodes on every rail, by a program at each node's place: a pod, or a host."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from lockstep.api.errors import ConfigError
from lockstep.plan.cluster.hardware import MeasuredRail, NodeHardware, RailEnd, rdma_rails, read_hardware, socket_rails
from lockstep.plan.cluster.pairs import PERFTEST, SOCKETS, STREAMS, Pair, PairRate, PairsMeasured, Way, rounds, seconds_each, slow_pairs
from lockstep.platforms.inpod import netrate, source_of
from lockstep.platforms.inpod.netfacts import TEXT_MAX
from lockstep.programs import Place, Program, ProgramFailed, lines_in, next_answer, python_program
from lockstep_spec.codec import FINITE, from_json
from lockstep_spec.words import number_of

ANSWER_SECONDS = 60.0
ROUNDS_TOLD = 16
"""Rounds between two lines about progress."""
RDMA_PORT = 18515
"""Port of ib_write_bw's own default, where no range is stated."""
Say = Callable[[str], None]


class NodeProgram:
    """The network program at one node."""

    def __init__(self, name: str, running: Program) -> None:
        self.name = name
        self._running = running
        self._lines = lines_in(running)

    async def ask(self, what: str, *, patience: float = ANSWER_SECONDS, **request: Any) -> Mapping[str, Any]:
        """Answer to one request. Raises ProgramFailed where none comes within `patience` seconds."""
        await self._running.write(f"{json.dumps({'what': what, **request})}\n".encode())
        try:
            async with asyncio.timeout(patience):
                return await next_answer(self._running, self._lines)
        except TimeoutError:
            raise ProgramFailed(f"{self.name}: the network program has not answered after {patience:.0f} s") from None


@asynccontextmanager
async def network_programs(places: Mapping[int, Place]) -> AsyncIterator[dict[int, NodeProgram]]:
    """Start the program at all places at once; all end with this. Raises ProgramFailed, with the place's name."""
    async with AsyncExitStack() as stack:

        async def start(place: Place) -> NodeProgram:
            return NodeProgram(place.name, await stack.enter_async_context(python_program(place, source_of(netrate))))

        started = await asyncio.gather(*(start(place) for _, place in sorted(places.items())), return_exceptions=True)
        for one in started:
            if isinstance(one, BaseException):
                raise one
        yield {node: one for node, one in zip(sorted(places), started, strict=True) if isinstance(one, NodeProgram)}


async def read_nodes(programs: Mapping[int, NodeProgram]) -> dict[int, NodeHardware]:
    """Hardware of all nodes. Raises ProgramFailed for an answer that isn't one."""

    async def read(program: NodeProgram) -> NodeHardware:
        try:
            return read_hardware(await program.ask("facts"))
        except (ValueError, RecursionError) as error:
            raise ProgramFailed(f"{program.name}: {error}") from None

    return dict(zip(programs, await asyncio.gather(*map(read, programs.values())), strict=True))


async def measure_pairs(
    places: Mapping[int, Place], names: Mapping[int, str], way: Way, say: Say, addresses: Mapping[int, str] | None = None
) -> PairsMeasured:
    """Measure all pairs, both directions, a rail after the other.

    `names`: of nodes, for people. `addresses`: where nodes reach each other, if that is stated. Raises ConfigError where nothing can be
    measured, ProgramFailed where a node's program ends.
    """
    async with network_programs(places) as programs:
        nodes = await read_nodes(programs)
        rails, over = chosen_rails(nodes, names, way, addresses, say)
        seconds = seconds_each(len(nodes), len(rails))
        schedule = rounds(sorted(nodes))
        say(
            f"{len(nodes)} nodes, {number_of(len(rails), 'rail')} of {number_of(len(schedule), 'round')}, {seconds:.2g} s a direction, by"
            f" {over}"
        )
        bench = _Perftest(programs, way, seconds) if over == PERFTEST else _Sockets(programs, way, seconds)
        await bench.prepare(rails)
        rates: list[PairRate] = []
        for rail in rails:
            measured: dict[Pair, PairRate] = {}
            for number, pairs in enumerate(schedule, 1):
                measured |= await _round(bench, rail, [(one, other) for one, other in pairs if one in rail.ends and other in rail.ends])
                if number % ROUNDS_TOLD == 0 or number == len(schedule):
                    say(f"rail {rail.name}: round {number} of {len(schedule)}")
            again = slow_pairs(measured.values())
            if again:
                say(f"rail {rail.name}: measures {number_of(len(again), 'slow pair')} once more")
            for pairs in schedule:
                for pair, rate in (await _round(bench, rail, pairs, again)).items():
                    measured[pair] = max(measured[pair], rate, key=lambda one: (not one.error, one.gbs))
            rates += measured.values()
        return PairsMeasured(names, nodes, tuple(rails), tuple(rates), over)


async def _round(
    bench: _Sockets | _Perftest, rail: MeasuredRail, pairs: Sequence[Pair], only: Collection[Pair] | None = None
) -> dict[Pair, PairRate]:
    """Measure disjoint pairs at once, one direction after the other. `only`: these directions."""
    rates: dict[Pair, PairRate] = {}
    for directed in (pairs, [pair[::-1] for pair in pairs]):
        chosen = [pair for pair in directed if only is None or pair in only]
        rates |= zip(chosen, await asyncio.gather(*(bench.measure(rail, pair) for pair in chosen)), strict=True)
    return rates


def chosen_rails(
    nodes: Mapping[int, NodeHardware], names: Mapping[int, str], way: Way, addresses: Mapping[int, str] | None, say: Say
) -> tuple[list[MeasuredRail], str]:
    """Return the rails that are to be measured, and the tool. Raises ConfigError where there are none."""
    sockets = socket_rails(nodes, addresses)
    if way.rdma:
        rails, why_not = rdma_rails(nodes, sockets), _why_no_rdma(nodes, names)
        if rails and not why_not:
            return rails, PERFTEST
        say(f"measures by sockets, not by RDMA: {why_not or 'no RDMA device is on a rail of all nodes'}")
    if not sockets:
        raise ConfigError("there is nothing to measure: no network interface of all nodes has an address of its own")
    return sockets, SOCKETS


def _why_no_rdma(nodes: Mapping[int, NodeHardware], names: Mapping[int, str]) -> str:
    without = [names[node] for node, facts in nodes.items() if not facts.hcas]
    if without:
        return f"{', '.join(without[:8])} {'shows' if len(without) == 1 else 'show'} no RDMA device that is up"
    lacking = [names[node] for node, facts in nodes.items() if PERFTEST not in facts.tools]
    return f"ib_write_bw (perftest; the trainer image has it) is missing on {', '.join(lacking[:8])}" if lacking else ""


class _Sockets:
    """TCP by the standard library, from an interface's address to the other's."""

    def __init__(self, programs: Mapping[int, NodeProgram], way: Way, seconds: float) -> None:
        self._programs, self._way, self._seconds = programs, way, seconds
        self._token = secrets.token_hex(netrate.TOKEN_BYTES)
        self._ports: dict[int, Mapping[str, Any]] = {}

    async def prepare(self, rails: Sequence[MeasuredRail]) -> None:
        async def listen(node: int) -> None:
            addresses = list(dict.fromkeys(rail.ends[node].address for rail in rails if node in rail.ends))
            answer = await self._programs[node].ask("listen", token=self._token, addresses=addresses, ports=self._way.ports)
            self._ports[node] = answer.get("ports") or {}

        await asyncio.gather(*map(listen, self._programs))

    async def measure(self, rail: MeasuredRail, pair: Pair) -> PairRate:
        sender, receiver = pair
        port = self._ports[receiver].get(rail.ends[receiver].address)
        if not isinstance(port, int):
            return PairRate(rail.name, sender, receiver, error=str(port or "it doesn't listen"))
        return await socket_rate(self._programs, self._token, rail, pair, port, self._seconds, self._way.line_gbs)


async def socket_rate(
    programs: Mapping[int, NodeProgram],
    token: str,
    rail: MeasuredRail,
    pair: Pair,
    port: int,
    seconds: float,
    line_gbs: float | None = None,
) -> PairRate:
    """Rate of one direction over sockets, to a port where the receiver listens for the token. `line_gbs`: as a person states it."""
    source, target = rail.ends[pair[0]], rail.ends[pair[1]]
    answer = await programs[pair[0]].ask(
        "send", patience=ANSWER_SECONDS + seconds, token=token, source=source.address, interface=source.interface,
        target=target.address, port=port, seconds=seconds, streams=STREAMS,
    )  # fmt: skip
    return _rate(rail, pair, answer, line_gbs)


class _Perftest:
    """RDMA by ib_write_bw."""

    def __init__(self, programs: Mapping[int, NodeProgram], way: Way, seconds: float) -> None:
        self._programs, self._way, self._seconds = programs, way, max(1.0, round(seconds))

    async def prepare(self, rails: Sequence[MeasuredRail]) -> None:
        """Each measurement starts a server of its own."""

    async def measure(self, rail: MeasuredRail, pair: Pair) -> PairRate:
        sender, receiver = pair
        port = self._way.ports[0] or RDMA_PORT
        serving = await self._programs[receiver].ask("serveRdma", **self._options(rail.ends[receiver], port))
        if "error" in serving:
            return _rate(rail, pair, serving, self._way.line_gbs)
        options = self._options(rail.ends[sender], port)
        answer = await self._programs[sender].ask(
            "sendRdma", patience=ANSWER_SECONDS + self._seconds, target=rail.ends[receiver].address, **options
        )
        return _rate(rail, pair, answer, self._way.line_gbs)

    def _options(self, end: RailEnd, port: int) -> dict[str, Any]:
        return {"device": end.hca, "hca_port": end.hca_port, "port": port, "gid_index": self._way.gid_index, "seconds": self._seconds}


@dataclass(frozen=True)
class _Measured:
    gbs: Annotated[float, FINITE]
    microseconds: int | None = None
    cores: Annotated[float, FINITE] | None = None
    device: bool = True


def _rate(rail: MeasuredRail, pair: Pair, answer: Mapping[str, Any], stated: float | None) -> PairRate:
    """Read an answer. Raises ProgramFailed for one that has neither a rate nor an error."""
    line = rail.line_gbs(*pair, stated)
    if "error" in answer:
        return PairRate(rail.name, *pair, line_gbs=line, error=str(answer["error"])[:TEXT_MAX])
    try:
        told = from_json(_Measured, answer, "it")
    except ValueError:
        raise ProgramFailed(f"a node answers {str(answer)[:100]!r}, which is no measurement") from None
    return PairRate(rail.name, *pair, told.gbs, line, "", told.microseconds, told.cores, told.device)
