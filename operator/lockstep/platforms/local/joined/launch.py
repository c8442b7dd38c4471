"""`lockstep launch`: node 0 of a job on this machine, and the door for the machines of the other nodes."""

from __future__ import annotations

import asyncio
import os
import uuid
from dataclasses import replace
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.platforms.jobs.agents import END_SECONDS, Agents, News, signals, write_run
from lockstep.platforms.jobs.machine import run_dir
from lockstep.platforms.local.joined.lobby import Lobby
from lockstep.platforms.local.joined.machine import machine_facts, own_address, place_text, require_variables
from lockstep.platforms.local.joined.seats import PORTS, Launched, devices_there, resolved_there
from lockstep.platforms.local.joined.token import LaunchToken, default_file, show, token_of_launch
from lockstep.platforms.onhost.look import highest_attempt
from lockstep.platforms.output import tell
from lockstep.platforms.places.orders import Door, Order
from lockstep_spec.exits import FAILED, INTERRUPTED


class Launch:
    """A job of which this machine has node 0. `root`: its workspace. Raises ConfigError where it can't be launched here."""

    def __init__(self, order: Order, door: Door, root: Path) -> None:
        host, port = door.at
        if port + PORTS - 1 > 65535:
            raise ConfigError(f"--at: a launch takes {PORTS} ports from {port} on: name one up to {65536 - PORTS}")
        self._door, self._name = door, order.job.metadata.name
        self._first = machine_facts(own_address(host), root, door.version)
        launched = Launched(order.job, order.cluster.profile, 1, str(uuid.uuid4()), port)
        self.resolved = resolved_there(launched, self._first, len(devices_there(launched, self._first)))
        self._launched = replace(launched, nodes=self.resolved.nodes)
        require_variables(launched.variables, os.environ)

    async def run(self, private: Path, held: int) -> int:
        """Run it to its end, and return its exit code. `private`: a folder of this user alone. `held`: the run's lock."""
        path = self._door.token_file or default_file(self._name, self._launched.port)
        lobby = Lobby(self._launched, self._first, highest_attempt(run_dir(self.resolved)))
        await lobby.open()
        code, message, patience = FAILED, "the launch has failed", END_SECONDS
        try:
            token, is_new = token_of_launch(path)
            await lobby.admit(token)
            with signals() as news:
                self._say_how_to_join(token, path, is_new)
                code, message, patience = await self._served(lobby, token, (private, held), news)
        finally:
            await lobby.end(code, message, patience)
        if self._door.token_file is None:
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
        code = await agents.run(lambda now: lobby.stop(now=now), signaled=self._door.signals_all)
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
