"""Short runs on hosts, of which only the result is wanted: preflight of a job, an all-reduce sweep, a few measured steps, and the rates
between all pairs.

Agents run beside whatever else is there, in a folder of their own, and end with the connection: nothing stays on a host however the command
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from posixpath import dirname, join
from typing import Any

from lockstep.api import names
from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import Failed
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object
from lockstep.plan.cluster.pairs import PairsMeasured, Way
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.place import AGENT, KEY, RUN, Seat, addresses_of, chosen, inputs_of, seats
from lockstep.plan.render.run import without_ranks
from lockstep.platforms.agentfile import build_agent
from lockstep.platforms.hosts.fleet import Fleet, within
from lockstep.platforms.hosts.start import refuse_missing
from lockstep.platforms.inpod import source_of
from lockstep.platforms.jobs.netrates import measure_pairs
from lockstep.platforms.jobs.shortresults import LINES, Hear, Read, Short, ShortEnd, ShortRuns
from lockstep.platforms.onhost import keep, sweep
from lockstep.programs import Program, ProgramFailed, answer_of, kept_alive, lines_in, python_program
from lockstep_gang.contract.run import Run, run_text
from lockstep_spec.words import printable_line

SECONDS = 900.0
"""Limit of a short run that nobody stated."""
BEAT_SECONDS = 10.0
PLACE_SECONDS = 120.0
END_SECONDS = 30.0
ENDINGS = (0, 1, 75)
Say = Callable[[str], None]
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


async def looked(fleet: Fleet, hosts: Sequence[str], job: str, paths: Mapping[str, list[list[str]]] | None = None) -> dict[str, HostFacts]:
    """Facts of these hosts, as `Fleet.look` asks for them. Raises Failed naming those that can't be reached."""
    answers, problems = await fleet.look(hosts, job=job, paths=paths, starts=True)
    if problems:
        raise Failed("; ".join(problems.values()))
    return answers


async def _seats(fleet: Fleet, job: TrainingJob, profile: TrainingCluster, *, needs_inputs: bool = False) -> list[Seat]:
    """Seats of the job. `needs_inputs`: refuse it where it would not find what it reads."""
    hosts = chosen(fleet.cluster, job.spec.nodes)
    paths = {host.name: inputs_of(job, profile, host) for host in hosts} if needs_inputs else None
    facts = await looked(fleet, [host.name for host in hosts], job.metadata.name, paths)
    refuse_missing(job.metadata.name, facts, fleet.again)
    return seats(job, profile, fleet.cluster, fleet.name, facts, str(uuid.uuid4()))


@dataclass(frozen=True)
class Brief:
    """A short run's part on one host."""

    host: str
    folder: str
    """Folder of its files there, which is removed with it."""
    command: tuple[str, ...]
    environment: dict[str, str]
    run: Run
    folders: tuple[str, ...]
    """Folders that must be there."""
    forgets: bool
    """True if the run's folder is removed, too."""

    def request(self, files: int) -> Object:
        return {
            "do": "brief", "files": files, "folder": self.folder, "command": list(self.command), "environment": self.environment,
            "folders": list(self.folders), "forget": self.run.run_dir if self.forgets else None,
        }  # fmt: skip


def _brief(seat: Seat, alter: Alter, *, forget: bool = False) -> Brief:
    """Part of a node. `forget`: it has a run's folder that no job has, and leaves none."""
    record, run = seat.record, seat.run
    folder = join(dirname(dirname(run.key_file)), f".{record.name}.{secrets.token_hex(6)}")  # (a job's key: STATE/JOB/key)
    agent = join(folder, AGENT)
    run_dir = join(record.workspace, "runs", f"{sweep.MEASURED}{record.name}") if forget else run.run_dir
    host = None if run.host is None else replace(run.host, unit="")
    own = alter(replace(run, key_file=join(folder, KEY), run_dir=run_dir, host=host, attempts_before=0), agent)
    command = (record.command[0], "-B", agent, "--run", join(folder, RUN), "--node", str(seat.node))
    return Brief(seat.host.name, folder, command, record.environment, own, (record.workspace, record.datasets), forget)


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

    async with AsyncExitStack() as stack:
        running: dict[str, _Running] = {}

        async def place(brief: Brief) -> None:
            async with within(PLACE_SECONDS, f"host {brief.host} has not taken the agent's files"):
                one = running[brief.host] = await stack.enter_async_context(_running(fleet, brief))
                await one.place({AGENT: agent, RUN: run_text(brief.run).encode(), KEY: key.encode()})

        by_host = {brief.host: brief for brief in briefs}
        _, refused = await fleet.all(by_host, lambda host: place(by_host[host]))
        if refused:
            raise Failed("nothing was started: " + "; ".join(refused.values()))
        followers = [asyncio.create_task(running[brief.host].follow(partial(line_of, brief))) for brief in briefs]
        try:
            await asyncio.gather(*(one.say(b"go\n") for one in running.values()))
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
                    await asyncio.gather(*(one.say(b"done\n") for one in running.values()), return_exceptions=True)
                    await asyncio.gather(*followers, return_exceptions=True)
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
    return " | ".join(tails[briefs[0].host])


class _Running:
    """A short run's program on one host."""

    def __init__(self, brief: Brief, program: Program) -> None:
        self._brief, self._program = brief, program
        self._lines = lines_in(program)

    async def place(self, files: dict[str, bytes]) -> None:
        """Send its files. Raises ProgramFailed with what the host says."""
        await self._program.write(json.dumps(self._brief.request(len(files))).encode() + b"\n")
        for name, data in files.items():
            head = {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            await self._program.write(json.dumps(head).encode() + b"\n" + data)
        said = await self._next()
        if said is None:
            raise self._program.failure()
        if "placed" not in said:
            raise ProgramFailed(f"{self._program.place.name}: {said.get('problem', said)}")

    async def say(self, word: bytes) -> None:
        await self._program.write(word)

    async def follow(self, hear: Callable[[Object], None]) -> None:
        """Pass on what it says, to its end. Raises ProgramFailed when the host says why it can't go on, or the connection breaks."""
        async with kept_alive(self._program, b".\n", BEAT_SECONDS):
            while (said := await self._next()) is not None:
                if "problem" in said:
                    raise ProgramFailed(f"{self._program.place.name}: {said['problem']}")
                if "removed" in said:
                    return
                hear(said)
        raise self._program.failure()

    async def _next(self) -> dict[str, Any] | None:
        line = await anext(self._lines, None)
        return None if line is None else answer_of(line, self._program.place.name)


@asynccontextmanager
async def _running(fleet: Fleet, brief: Brief) -> AsyncIterator[_Running]:
    async with python_program(fleet.place(brief.host), source_of(keep)) as program:
        yield _Running(brief, program)
