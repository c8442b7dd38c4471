"""Start a job on hosts, and do to it what people ask for: stop, resume, retry, delete. Nothing of a start is to be seen before all hosts
have its files.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import shlex
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.hosts import Host
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object
from lockstep.plan.ahead.submission import refuse_ended
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.leftovers import LeftAgent, leftovers
from lockstep.plan.hosts.needs import refusals
from lockstep.plan.hosts.place import AGENT, KEY, RUN, Seat, chosen, inputs_of, seats, unlimited_lines
from lockstep.plan.hosts.record import Coordinator, record_text
from lockstep.plan.hosts.status import Seen, host_job, seen_jobs
from lockstep.plan.hosts.volumes import refuse_apart
from lockstep.plan.render.resolve import path_lines
from lockstep.platforms.agentfile import build_agent
from lockstep.platforms.hosts.fleet import Fleet, within
from lockstep.platforms.hosts.volumes import looking_for_marks
from lockstep.platforms.inpod import source_of
from lockstep.platforms.onhost import keep
from lockstep.platforms.output import tell
from lockstep.platforms.places.orders import Order
from lockstep.platforms.places.values import STOP_SECONDS
from lockstep.programs import Program, lines_in, next_answer, python_program
from lockstep_gang.contract.run import run_text
from lockstep_spec.choices import StorageMode
from lockstep_spec.words import named

PLACE_SECONDS = 120.0


async def start(fleet: Fleet, order: Order, *, patience: float = 0.0) -> Seen:
    """Start the job's agents on its hosts, and return it as it was started. `patience`: seconds to wait until all of its ranks run.

    Raises:
        ConfigError: the job can't run on these hosts as written, or has ended there or runs already.
        Failed: a host could not be reached, or could not start it; then no host has a trace of it.
    """
    job, profile = order.job, order.cluster.profile
    hosts = chosen(fleet.cluster, job.spec.nodes, first=order.hosts.first, without=order.hosts.without)
    names = [host.name for host in hosts]
    name = job.metadata.name
    inputs = {host.name: inputs_of(job, profile, host) for host in hosts}
    answers = await looked(fleet, names, name, inputs)
    answers = await end_leftovers(fleet, answers, leftovers(answers, fleet.cluster, fleet.name))
    refuse_running(name, answers, fleet.again)
    _refuse_ended(fleet, order, answers)
    refuse_unfit(fleet, job, hosts, answers)
    answers = await _lingering(fleet, answers)
    record_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    placed = [_dated(seat, record_time) for seat in seats(job, profile, fleet.cluster, fleet.name, answers, str(uuid.uuid4()))]
    for line in (*path_lines(placed[0].resolved), *unlimited_lines(placed)):
        tell(line)
    key, building = secrets.token_hex(32), asyncio.create_task(asyncio.to_thread(build_agent, compiled=True))
    mode, workspaces = placed[0].resolved.storage_mode, {host: facts.workspace.path for host, facts in answers.items()}
    async with looking_for_marks(fleet, workspaces, stated=mode is StorageMode.SHARED) as sharing:

        async def check_storage() -> None:
            if line := refuse_apart(await sharing, mode, workspaces[names[0]]):
                tell(line)

        agent = await building
        files = {seat.host.name: _files(seat, key, agent) for seat in placed}
        await _place_and_go(fleet, {"do": "start", "job": name, "fresh": True}, files, placed[0].record.coordinator, check_storage)
    answers, problems = await fleet.look_for(name, names, patience)
    return seen_jobs(answers, problems).get(name) or Seen(placed[0].record, {}, problems)


async def _lingering(fleet: Fleet, answers: Mapping[str, HostFacts]) -> dict[str, HostFacts]:
    """Switch linger on where units are stopped at the end of a login, and return the facts with what came of it. Many hosts leave that to
    root.
    """

    async def ask(name: str) -> bool:
        return bool((await _request(fleet, name, {"do": "linger"}))["lingers"])

    asked = [name for name, facts in answers.items() if facts.has_units and not facts.lingers]
    lingers, problems = await fleet.all(asked, ask)
    if problems:
        raise Failed("; ".join(problems.values()))
    return {name: replace(facts, lingers=facts.lingers or lingers.get(name, False)) for name, facts in answers.items()}


def _dated(seat: Seat, when: str) -> Seat:
    metadata = {**seat.record.job["metadata"], "creationTimestamp": when}
    return replace(seat, record=replace(seat.record, job={**seat.record.job, "metadata": metadata}))


def _files(seat: Seat, key: str, agent: bytes) -> dict[str, bytes]:
    return {AGENT: agent, RUN: run_text(seat.run).encode(), "job.json": record_text(seat.record).encode(), KEY: key.encode()}


def refuse_running(name: str, answers: Mapping[str, HostFacts], again: str) -> None:
    running = [host for host, facts in answers.items() if facts.jobs[name].runs]
    if running:
        raise ConfigError(
            f"job {name} runs already on {named('host', running)}: lockstep logs {name} -f {again} follows it, lockstep stop {name} {again}"
            " stops it"
        )


def _refuse_ended(fleet: Fleet, order: Order, answers: Mapping[str, HostFacts]) -> None:
    """Raise ConfigError where a job of this name has ended, unless it is to train anew."""
    seen = seen_jobs(answers, {}).get(order.job.metadata.name)
    if seen is None or not order.typed.file or order.typed.is_fresh:
        return
    job, at = host_job(seen, fleet.again, time.time()).job, f"{order.job.metadata.name} {fleet.again}"
    refuse_ended(order.job, job, at, f"lockstep retry {at}", order.typed)


def refuse_unfit(fleet: Fleet, job: TrainingJob, hosts: Sequence[Host], answers: Mapping[str, HostFacts]) -> None:
    """Raise ConfigError naming what the job lacks on its hosts, with what to do."""
    if reasons := refusals(job, hosts, answers, fleet.typed, fleet.again, _local_path):
        raise ConfigError(*reasons)


def _local_path(path: str) -> str:
    """Return the file or folder of this name in the working directory, as a word of a command line; PATH where there is none."""
    own = Path(path).name
    return shlex.quote(own) if own and Path(own).exists() else "PATH"


async def looked(fleet: Fleet, hosts: Sequence[str], job: str, paths: Mapping[str, list[list[str]]] | None = None) -> dict[str, HostFacts]:
    """Facts of these hosts, as `Fleet.look` asks for them. Raises Failed naming those that can't be reached."""
    answers, problems = await fleet.look(hosts, job=job, paths=paths, starts=True)
    if problems:
        raise Failed("; ".join(problems.values()))
    return answers


@asynccontextmanager
async def place_files(
    fleet: Fleet, requests: Mapping[str, Object], files: Mapping[str, Mapping[str, bytes]]
) -> AsyncIterator[dict[str, Program]]:
    """Put the files on every host, by a program there that then waits for `go`, and yield the programs.

    Raises Failed naming every host that did not take them. Then, and when this process ends before, nothing stays on any host.
    """
    async with AsyncExitStack() as stack:
        programs: dict[str, Program] = {}

        async def place(name: str) -> None:
            async with within(PLACE_SECONDS, f"host {name} has not taken the job's files"):
                program = programs[name] = await stack.enter_async_context(_keeper(fleet, name))
                texts = {file: base64.b64encode(data).decode() for file, data in files[name].items()}
                await program.write(json.dumps({**requests[name], "files": texts}).encode() + b"\n")
                await next_answer(program, lines_in(program), "placed")

        _, problems = await fleet.all(requests, place)
        if problems:
            raise Failed("nothing was started: " + "; ".join(problems.values()))
        yield programs


async def _place_and_go(
    fleet: Fleet,
    request: dict[str, Any],
    files: Mapping[str, Mapping[str, bytes]],
    witness: Coordinator,
    check: Callable[[], Awaitable[None]] | None = None,
    ran: Sequence[str] = (),
) -> None:
    """Put the files on every host; when all have them, let node 0 begin, then the others. `ran`: hosts whose agents are to be started anew.

    Raises Failed as `place_files` does, or what `check` raises before any begins; then nothing stays on any host.
    """
    names = list(files)
    requests = {name: {**request, "witness": list(witness) if name != names[0] else None, "ran": name in ran} for name in names}
    async with place_files(fleet, requests, files) as programs:

        async def go(name: str) -> None:
            async with within(PLACE_SECONDS, f"host {name} has not said that its agent runs"):
                await programs[name].write(b"go\n")
                await next_answer(programs[name], lines_in(programs[name]), "started")

        if check is not None:
            await check()
        await go(names[0])
        _, problems = await fleet.all(names[1:], go)
    if problems:
        raise Failed(
            f"the job was started only in part: {'; '.join(problems.values())}: lockstep delete {request['job']} {fleet.again} removes it"
        )


@asynccontextmanager
async def _keeper(fleet: Fleet, name: str) -> AsyncIterator[Program]:
    async with python_program(fleet.place(name), source_of(keep)) as program:
        yield program


async def start_again(fleet: Fleet, seen: Seen, *, retry: int | None = None) -> None:
    """Start the agents of a job that was stopped, has ended or whose hosts lost them; `retry`: its new count of retries.

    Raises Failed where a host of it can't be reached, or runs it since somebody else has started it again.
    """
    _refuse_partial(seen)
    names, key = list(seen.hosts), secrets.token_hex(32)
    request = {"do": "start", "job": seen.record.name, "fresh": False} | ({} if retry is None else {"retry": retry})
    # Where no agent ran, one that runs by then is somebody else's, and is left alone.
    ran = [name for name, job in seen.jobs.items() if job.runs]
    await _place_and_go(fleet, request, {name: {KEY: key.encode()} for name in names}, seen.record.coordinator, ran=ran)


def _refuse_partial(seen: Seen) -> None:
    if seen.problems or seen.missing:
        lost = [*seen.problems.values(), *([f"{named('host', seen.missing)} has no files of it"] if seen.missing else [])]
        raise Failed(f"job {seen.record.name} needs all of its hosts: {'; '.join(lost)}")


async def stop(fleet: Fleet, seen: Seen, *, now: bool = False) -> None:
    """Let the job save and stop on all of its hosts, without a wait for its end. Raises Failed naming those that could not be told."""
    await _told(fleet, seen.jobs, {"do": "stop", "job": seen.record.name, "wait": False, "now": now}, seen.problems)


async def remove(fleet: Fleet, seen: Seen) -> None:
    """Stop the job, and remove its files but what it left in the workspace. Raises Failed naming the hosts that could not be told."""
    await _told(fleet, seen.jobs, {"do": "remove", "job": seen.record.name, "now": False}, seen.problems)


async def end_leftovers(fleet: Fleet, answers: Mapping[str, HostFacts], found: Sequence[LeftAgent]) -> dict[str, HostFacts]:
    """End agents that wait for jobs which are over, and return the answers as they are then. What can't be ended is said, and stays as it
    is.
    """
    jobs = {host: dict(facts.jobs) for host, facts in answers.items()}

    async def one(host: str) -> None:
        for left in found:
            if left.host != host:
                continue
            said = await _request(fleet, host, {"do": "end", "job": left.job, "uid": left.uid, "deleted": left.deleted})
            if not said["ended"]:
                continue  # a new start of this name has just taken its place
            tell(str(left))
            there = replace(jobs[host][left.job], unit="" if left.deleted else "inactive", supervised=False)
            jobs[host][left.job] = replace(there, record=None) if left.deleted else there

    _, problems = await fleet.all({left.host: None for left in found}, one)
    for problem in problems.values():
        tell(f"warning: {problem}")
    return {host: replace(facts, jobs=jobs[host]) for host, facts in answers.items()}


async def _told(fleet: Fleet, hosts: Mapping[str, object], request: dict[str, Any], away: Mapping[str, str]) -> None:
    async def one(name: str) -> None:
        await _request(fleet, name, request)

    _, problems = await fleet.all(hosts, one)
    if problems or away:
        verb = {"remove": "delete"}.get(request["do"], request["do"])
        again = f". Once all hosts answer: lockstep {verb} {request['job']} {fleet.again}" if away else ""
        raise Failed("; ".join([*problems.values(), *away.values()]) + again)


async def _request(fleet: Fleet, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without files. Raises ProgramFailed with what the host can't do."""
    what, remedy = f"host {name} has not answered", ""
    if job := request.get("job"):
        what = f"host {name}: job {job} was told to stop, and has not saved and ended"
        remedy = f": lockstep stop {job} {fleet.again} --now ends it without a save"
    async with within(STOP_SECONDS, what, remedy), _keeper(fleet, name) as program:
        await program.write(json.dumps(request).encode() + b"\n")
        return await next_answer(program, lines_in(program))
