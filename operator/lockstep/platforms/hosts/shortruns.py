"""Short runs on hosts, of which only the result is wanted: preflight of a job, an all-reduce sweep, a few measured steps, and the rates
between all pairs.

Agents run beside whatever else is there, in a folder of their own, and end with the connection: nothing stays on a host however the command
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from posixpath import dirname, join
from typing import NamedTuple

from lockstep.api import names
from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import Failed
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object
from lockstep.plan.cluster.pairs import PairsMeasured, Way
from lockstep.plan.hosts.place import AGENT, KEY, RUN, Seat, addresses_of, chosen, inputs_of, seats
from lockstep.plan.render.run import without_ranks
from lockstep.platforms.agentfile import build_agent
from lockstep.platforms.hosts.fleet import Fleet, within
from lockstep.platforms.hosts.start import looked, place_files, refuse_unfit
from lockstep.platforms.jobs.netrates import measure_pairs
from lockstep.platforms.jobs.shortresults import LINES, Hear, Read, Short, ShortEnd, ShortRuns
from lockstep.platforms.onhost import sweep
from lockstep.platforms.places.values import Say
from lockstep.programs import Program, kept_alive, lines_in, next_answer
from lockstep_gang.contract.run import Run, run_text
from lockstep_spec.words import printable_line

SECONDS = 900.0
"""Limit of a short run that nobody stated."""
BEAT_SECONDS = 10.0
PLACE_SECONDS = 120.0
END_SECONDS = 30.0
ENDINGS = (0, 1, 75)
Alter = Callable[[Run, str], Run]
"""Change of a node's run; gets the path of the agent's file, too."""


class HostRuns(ShortRuns):
    """Short runs on hosts."""

    left = "nothing is left on the hosts"
    silent = True

    def __init__(self, fleet: Fleet, profile: TrainingCluster, say: Say, seconds: float | None = None) -> None:
        self._fleet, self._profile, self._say, self._seconds = fleet, profile, say, seconds or SECONDS

    async def run(self, kind: Short, job: TrainingJob, hear: Hear, read: Read | None = None) -> ShortEnd:
        placed = await _seats(self._fleet, job, self._profile, needs_inputs=kind is Short.STEPS)
        briefs = [_brief(seat, _ALTERS[kind], forget=kind is not Short.PREFLIGHT) for seat in placed]
        end = None if read is None else partial(read, self._fleet.place(placed[0].host.name), briefs[0].run.run_dir)
        last = await _run(self._fleet, briefs, hear, self._seconds, end)
        return ShortEnd(last, placed[0].resolved.transport.value, len(placed))

    async def pairs(self, job: TrainingJob, way: Way) -> PairsMeasured:
        """From each host's stated address to the others', on ports of the cluster file."""
        hosts = chosen(self._fleet.cluster, job.spec.nodes)
        facts = await looked(self._fleet, [host.name for host in hosts], "")
        async with within(self._seconds, "some pairs have had no rate", " (--timeout)"):
            return await measure_pairs(
                {node: self._fleet.place(host.name) for node, host in enumerate(hosts)},
                {node: host.name for node, host in enumerate(hosts)},
                replace(way, ports=self._fleet.cluster.port_range),
                lambda line: self._say(f"lockstep: {line}"),
                dict(enumerate(addresses_of(hosts, facts))),
            )


def _own_agent(run: Run, agent: str) -> Run:
    """Let ranks run the agent's own file, where this run has it."""
    paths = () if run.preflight is None else tuple(one for one in run.preflight.paths if one.path != names.AGENT_PATH)
    preflight = None if run.preflight is None else replace(run.preflight, paths=paths)
    return replace(run, command=(run.command[0], agent, *run.command[2:]), preflight=preflight)


_ALTERS: Mapping[Short, Alter] = {
    Short.PREFLIGHT: lambda run, agent: without_ranks(run, run.run_dir), Short.SWEEP: _own_agent, Short.STEPS: lambda run, agent: run,
}  # fmt: skip


async def _seats(fleet: Fleet, job: TrainingJob, profile: TrainingCluster, *, needs_inputs: bool = False) -> list[Seat]:
    """Seats of the job. `needs_inputs`: refuse it where it would not find what it reads."""
    hosts = chosen(fleet.cluster, job.spec.nodes)
    paths = {host.name: inputs_of(job, profile, host) for host in hosts} if needs_inputs else None
    facts = await looked(fleet, [host.name for host in hosts], job.metadata.name, paths)
    refuse_unfit(fleet, job, hosts, facts)
    return seats(job, profile, fleet.cluster, fleet.name, facts, str(uuid.uuid4()))


class Brief(NamedTuple):
    """A short run's part on one host."""

    host: str
    run: Run
    request: Object
    """Request to `keep`, but for its files."""


def _brief(seat: Seat, alter: Alter, *, forget: bool = False) -> Brief:
    """Part of a node. `forget`: it has a run's folder that no job has, and leaves none."""
    record, run = seat.record, seat.run
    folder = join(dirname(dirname(run.key_file)), f".{record.name}.{secrets.token_hex(6)}")  # (a job's key: STATE/JOB/key)
    agent = join(folder, AGENT)
    run_dir = join(record.workspace, "runs", f"{sweep.MEASURED}{record.name}") if forget else run.run_dir
    host = None if run.host is None else replace(run.host, unit="")
    own = alter(replace(run, key_file=join(folder, KEY), run_dir=run_dir, host=host, attempts_before=0), agent)
    request = {
        "do": "brief", "folder": folder, "folders": [record.workspace, record.datasets], "environment": record.environment,
        "command": [record.command[0], "-B", agent, "--run", join(folder, RUN), "--node", str(seat.node)],
        "forget": own.run_dir if forget else None,
    }  # fmt: skip
    return Brief(seat.host.name, own, request)


async def _run(
    fleet: Fleet, briefs: Sequence[Brief], hear: Callable[[str], bool], seconds: float, read: Callable[[], Awaitable[None]] | None = None
) -> str:
    """Run the agents until `hear` says of a line of node 0 that it was the last one that matters, or one ends; then `read`, and remove all.

    Return node 0's last lines. Raises Failed when it takes longer than `seconds`, or an agent ends by a fault of its own.
    """
    key, agent = secrets.token_hex(32), await asyncio.to_thread(build_agent, compiled=True)
    heard = asyncio.Event()
    tails: dict[str, deque[str]] = {brief.host: deque(maxlen=LINES) for brief in briefs}
    problems: list[str] = []

    def line_of(brief: Brief, said: Object) -> None:
        line = said.get("line")
        if isinstance(line, str):
            tails[brief.host].append(printable_line(line))
            if brief is briefs[0] and hear(line):
                heard.set()
        elif "ended" in said and (brief is briefs[0] or said["ended"] not in ENDINGS):
            if said["ended"] not in ENDINGS:
                problems.append(f"the agent on host {brief.host} ended with {said['ended']}: {' | '.join(tails[brief.host])}")
            heard.set()

    files = {brief.host: {AGENT: agent, RUN: run_text(brief.run).encode(), KEY: key.encode()} for brief in briefs}
    async with place_files(fleet, {brief.host: brief.request for brief in briefs}, files) as running:
        followers = [asyncio.create_task(_follow(running[brief.host], partial(line_of, brief))) for brief in briefs]
        try:
            await asyncio.gather(*(one.write(b"go\n") for one in running.values()))
            waiting = asyncio.create_task(heard.wait())
            gone, _ = await asyncio.wait({*followers, waiting}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not heard.is_set():
                for broken in gone:
                    await broken
                raise Failed(
                    f"it has not ended after {seconds:.0f} s (--timeout); the log of node 0 ends with: {' | '.join(tails[briefs[0].host])}"
                )
            if problems:
                raise Failed(problems[0])
            if read is not None:
                await read()
        finally:
            with contextlib.suppress(Failed, TimeoutError, OSError):
                async with asyncio.timeout(END_SECONDS):
                    await asyncio.gather(*(one.write(b"done\n") for one in running.values()), return_exceptions=True)
                    await asyncio.gather(*followers, return_exceptions=True)
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
    return " | ".join(tails[briefs[0].host])


async def _follow(program: Program, hear: Callable[[Object], None]) -> None:
    """Pass on what a short run's program says, to its end. Raises ProgramFailed when the host says why it can't go on, or the connection
    breaks.
    """
    lines = lines_in(program)
    async with kept_alive(program, b".\n", BEAT_SECONDS):
        while "removed" not in (said := await next_answer(program, lines)):
            hear(said)
