"""`lockstep launch`: node 0 of a job on this machine, and the door for the machines of the other nodes."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.render.resolve import path_lines, unkept_lines
from lockstep.platforms.hosts.joined.lobby import Lobby
from lockstep.platforms.hosts.joined.machine import NodeMachine, highest_attempt, machine_facts, own_address, place_text
from lockstep.platforms.hosts.joined.seats import PORTS, Launched, devices_there, resolved_there
from lockstep.platforms.hosts.joined.token import LaunchToken, default_file, show, token_of_launch
from lockstep.platforms.jobs.agents import Agents, News, signals, write_run
from lockstep.platforms.jobs.machine import END_SECONDS, alone, check_inputs, require_variables, run_dir
from lockstep.platforms.output import tell
from lockstep_spec.exits import FAILED, INTERRUPTED


@dataclass(frozen=True)
class LaunchRequest:
    """The job and the place, as the person typed them."""

    job: TrainingJob
    profile: TrainingCluster
    at: tuple[str, int]
    workspace: Path
    version: str
    token_file: Path | None = None
    signals_all: bool = False
    """Whoever started this process signals the agent, too."""


def launch_job(request: LaunchRequest, environment: dict[str, str]) -> int:
    """Run the job to its end, and return its exit code: 0 complete, 1 failed, 130 interrupted. Raises ConfigError before anything is
    started.
    """
    launched, first = _prepared(request, environment)
    resolved = resolved_there(launched, first, len(devices_there(launched, first)))
    require_variables(launched.variables, environment)
    check_inputs(resolved)
    for line in (*path_lines(resolved), *unkept_lines(resolved, "here", "ranks take what their machine has")):
        tell(line)
    folder = run_dir(resolved)
    with alone(folder, request.job) as held, tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        return asyncio.run(_Launch(request, launched, first).run(Path(private), held, highest_attempt(folder)))


def _prepared(request: LaunchRequest, environment: dict[str, str]) -> tuple[Launched, NodeMachine]:
    host, port = request.at
    if port + PORTS - 1 > 65535:
        raise ConfigError(f"--at: a launch takes {PORTS} ports from {port} on: name one up to {65536 - PORTS}")
    first = machine_facts(own_address(host), request.workspace, request.version, environment)
    launched = Launched(request.job, request.profile, 1, str(uuid.uuid4()), port)
    return replace(launched, nodes=resolved_there(launched, first, len(devices_there(launched, first))).nodes), first


class _Launch:
    def __init__(self, request: LaunchRequest, launched: Launched, first: NodeMachine) -> None:
        self._request, self._launched, self._first = request, launched, first
        self._name = launched.job.metadata.name

    async def run(self, private: Path, held: int, attempts: int) -> int:
        path = self._request.token_file or default_file(self._name, self._launched.port)
        lobby = Lobby(self._launched, self._first, attempts)
        await lobby.open()
        code, message, patience = FAILED, "the launch has failed", END_SECONDS
        try:
            token, is_new = token_of_launch(path)
            await lobby.admit(token)
            self._say_how_to_join(token, path, is_new)
            with signals() as news:
                code, message, patience = await self._served(lobby, token, (private, held), news)
        finally:
            await lobby.end(code, message, patience)
        if self._request.token_file is None:
            path.unlink(missing_ok=True)
        return code

    async def _served(self, lobby: Lobby, token: LaunchToken, files: tuple[Path, int], news: News) -> tuple[int, str, float]:
        """Return the exit code, words for the joiners, and the seconds that they may take to end."""
        gathering, stopping = asyncio.ensure_future(lobby.gather()), asyncio.ensure_future(news.get())
        await asyncio.wait((gathering, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            gathering.cancel()
            tell("", "lockstep: stopped before all machines were there, nothing was started")
            return INTERRUPTED, "the launch was stopped before all machines were there", END_SECONDS
        if stopping.done():
            news.put_nowait(stopping.result())
        stopping.cancel()
        private, held = files
        run = replace(gathering.result()[0], key_file=str(private / "key"))
        path = write_run(run, token.job_key(self._launched.uid))
        agents = Agents(path, news, held=(held,), save_seconds=run.save_grace_seconds)
        code = await agents.run(lambda now: lobby.stop(now=now), signaled=self._request.signals_all)
        if code == INTERRUPTED:
            return code, "the launch was stopped", run.save_grace_seconds + END_SECONDS
        return code, "the job is complete" if code == 0 else "the job has failed: node 0's log has the reason", END_SECONDS

    def _say_how_to_join(self, token: LaunchToken, path: Path, is_new: bool) -> None:
        address, port, others = self._first.address, self._launched.port, self._launched.nodes - 1
        if not others:
            return
        tell(
            f"lockstep: job {self._name} has {others + 1} nodes, this machine is node 0. On"
            f" {'the other machine' if others == 1 else f'each of the other {others} machines'}:",
            f"    lockstep join {place_text(address, port)}",
        )
        if not is_new:
            tell(f"lockstep: the token is that of the earlier launch: {path} has it")
        elif show(token):
            tell(f"lockstep: the token is shown once, and {path} has it, which only you can read")
        else:
            tell(f"lockstep: the token is in {path}, which only you can read: this process has no terminal to show it on")
        tell(
            f"lockstep: listening on {address} alone: port {port} for joiners, {port + 1} for agents, one from {port + 2} to"
            f" {port + PORTS - 1} for ranks; NCCL and gloo take any port between the machines",
            "lockstep: anyone who has the token can run programs as you on the machines that join",
        )
