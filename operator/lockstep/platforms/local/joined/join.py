"""`lockstep join`: a node of a job that another machine launches. It waits for that launch, runs the node's agent, and comes back to a
launch that was away.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.platforms.jobs.agents import END_SECONDS, Agents, News, signals, write_run
from lockstep.platforms.local.joined.channel import connect
from lockstep.platforms.local.joined.machine import Joining, machine_facts, place_text, require_variables
from lockstep.platforms.local.joined.token import LaunchToken, token_to_join
from lockstep.platforms.onhost.look import highest_attempt
from lockstep.platforms.output import tell
from lockstep.platforms.places.orders import Door
from lockstep_gang.contract.channel import Channel
from lockstep_gang.contract.run import Run
from lockstep_spec.codec import ContractError, from_json, to_json
from lockstep_spec.exits import CONFIGURATION, FAILED, INTERRUPTED, SAVED

RETRY_SECONDS = 1.0
SAY_SECONDS = 30.0
LEFT_BEHIND_SECONDS = 180.0
"""Longest wait for an agent of an earlier join on this machine, whose ranks still save."""


@dataclass(frozen=True)
class JoinRequest:
    """The launch and this machine's part in it, as the person typed them."""

    door: Door
    workspace: Path
    node: int | None = None
    patience_seconds: float = float("inf")
    """Longest wait for a launch that was never reached."""


def join_launch(request: JoinRequest) -> int:
    """Serve as a node to the job's end, and return its exit code: 0 complete, 1 failed, 130 interrupted. Raises ConfigError."""
    token = token_to_join(request.door.token_file, request.patience_seconds if isfinite(request.patience_seconds) else 0.0)
    try:
        (request.workspace / "workspace").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write in {request.workspace} ({error.strerror}): name another folder by --cluster") from None
    with _held(request) as held, tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        return asyncio.run(_Join(request, token, Path(private), held).run())


@contextmanager
def _held(request: JoinRequest) -> Iterator[int]:
    """A name of this machine that one join in this workspace has, and its agent for as long as it lives. Raises ConfigError."""
    name = hashlib.sha256(f"{request.door.at}\n{request.workspace.resolve()}".encode()).hexdigest()[:32]
    give_up, is_said = time.monotonic() + LEFT_BEHIND_SECONDS, False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mark:
        while True:
            try:
                mark.bind(f"\0lockstep-join-{name}")
                break
            except OSError:
                if time.monotonic() >= give_up:
                    raise ConfigError(
                        f"another lockstep join in {request.workspace} runs on this machine: wait for it, or stop it with Ctrl-C"
                    ) from None
            if not is_said:
                tell("lockstep: another lockstep join in this folder is still here, or its ranks still save: waiting for its end")
                is_said = True
            time.sleep(RETRY_SECONDS)
        yield mark.fileno()


class _Join:
    def __init__(self, request: JoinRequest, token: LaunchToken, private: Path, held: int) -> None:
        self._request, self._token, self._private, self._held = request, token, private, held
        self._where = place_text(*request.door.at)
        self._agents: Agents | None = None
        self._uid = ""
        self._news: News
        self._is_stopped = False
        self._was_there = False
        self._channel: Channel | None = None

    async def run(self) -> int:
        with signals() as news:
            self._news = news
            tasks = [asyncio.ensure_future(self._follow()), asyncio.ensure_future(self._attend())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                code = next(task.result() for task in tasks if task in done)
                if self._channel is not None:
                    self._channel.send({"kind": "left", "code": code})
                return code
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if self._agents is not None:
                    await self._agents.end()

    async def _attend(self) -> int:
        """Wait for a signal while nothing runs here, or the end of the agent whose end counts: not one that another launch's has replaced.
        One that is killed is started again.
        """
        is_first = True
        while True:
            news = await self._news.get()
            if isinstance(news, signal.Signals):
                if self._agents is None:
                    tell("", "lockstep: stopped, this machine has not taken part")
                    return INTERRUPTED
                if not self._is_stopped:
                    tell("", "lockstep: stopping, the ranks save first (Ctrl-C again: at once)")
                if not (is_first and self._request.door.signals_all):  # (a second signal would end its save)
                    self._agents.tell()
                is_first, self._is_stopped = False, True
            elif news.agents is self._agents:
                if self._is_stopped:
                    return INTERRUPTED
                if news.code >= 0:
                    return self._exit_code(news.code)
                tell(f"lockstep: the agent {news.how}: it is started again")
                await asyncio.sleep(RETRY_SECONDS)
                if news.agents is self._agents:
                    await self._agents.start()

    def _exit_code(self, code: int) -> int:
        if code == SAVED:
            tell(f"lockstep: the agent was told to save and stop; to bring this node back: lockstep join {self._where}")
            return INTERRUPTED
        if code == CONFIGURATION:
            raise ConfigError("the agent can't run here as the launch wants it: its last lines say why")
        return 0 if code == 0 else FAILED

    async def _follow(self) -> int:
        """Do what the launch says; come back to it when the connection is lost. Returns the exit code that it tells."""
        while True:
            channel = await self._connected()
            self._was_there, self._channel = True, channel
            try:
                while True:
                    code = await self._take(channel, await channel.receive())
                    if code is not None:
                        return code
            except (EOFError, OSError):
                tell(f"lockstep: lost the connection to the launch at {self._where}, waiting for it")
            except ContractError as error:
                tell(f"lockstep: closed the connection to the launch at {self._where}: {error}")
            finally:
                self._channel = None
                channel.close()
                await channel.wait_closed()
            await asyncio.sleep(RETRY_SECONDS)

    async def _connected(self) -> Channel:
        started = time.monotonic()
        say_at = started
        while True:
            try:
                return await connect(self._request.door.at, self._token)
            except ContractError as error:
                raise ConfigError(f"{self._where} is no launch of this version of lockstep: {error}") from None
            except (EOFError, OSError) as error:
                reason = _reason(error)
            now = time.monotonic()
            if not self._was_there and now - started >= self._request.patience_seconds:
                raise ConfigError(f"no launch came to {self._where} in {self._request.patience_seconds:.0f} s ({reason}): is node 0 there?")
            if now >= say_at:
                tell(f"lockstep: waiting for lockstep launch at {self._where} ({reason})")
                say_at = now + SAY_SECONDS
            await asyncio.sleep(RETRY_SECONDS)

    async def _take(self, channel: Channel, message: dict[str, Any]) -> int | None:
        """Take one message of the launch. Returns the exit code when it is the last."""
        kind = message.get("kind")
        if kind == "welcome":
            self._introduce(channel, str(message.get("job")))
        elif kind == "refused":
            raise ConfigError(f"the launch at {self._where} has refused this machine: {message.get('message')}")
        if kind == "waiting":
            tell(f"lockstep: joined, {message.get('present')} of {message.get('nodes')} machines are there")
        elif kind == "assigned":
            await self._assigned(message)
        elif kind == "stop" and self._agents is not None:
            tell(f"lockstep: the launch was stopped{' at once' if message.get('now') else ', the ranks save first'}")
            if message.get("now") or not (self._is_stopped or self._request.door.signals_all):
                self._agents.tell()
            self._is_stopped = True
        elif kind == "over":
            return await self._over(message)
        return None

    def _introduce(self, channel: Channel, job: str) -> None:
        request = self._request
        facts = machine_facts(channel.connection.getsockname()[0], request.workspace, request.door.version)
        attempts = highest_attempt(request.workspace / "workspace" / "runs" / Path(job).name)
        channel.send({"kind": "joining", **to_json(Joining(facts, request.node, attempts))})

    async def _assigned(self, message: dict[str, Any]) -> None:
        run = from_json(Run, message.get("run"), "the launch's run")
        node = from_json(int, message.get("node"), "the launch's node")
        require_variables(map(str, message.get("variables") or ()), os.environ)
        if self._agents is not None:
            if self._uid == run.job.uid:
                return  # only the connection was away
            tell("lockstep: the job was launched anew: this node's earlier agent ends first")
            earlier, self._agents = self._agents, None
            await earlier.end()
        self._uid = run.job.uid
        path = write_run(replace(run, key_file=str(self._private / "key")), self._token.job_key(run.job.uid))
        self._agents = Agents(path, self._news, (node,), held=(self._held,), save_seconds=run.save_grace_seconds)
        tell(f"lockstep: this machine is node {node} of {run.nodes} of job {run.job.name}, its folder is {run.run_dir}")
        await self._agents.start()

    async def _over(self, message: dict[str, Any]) -> int:
        code = message.get("code")
        if self._agents is not None:
            await self._agents.end(END_SECONDS)
        tell(f"lockstep: {message.get('message')}")
        return code if isinstance(code, int) and 0 <= code <= 255 else FAILED


def _reason(error: Exception) -> str:
    """Reason for which there is no connection, in the system's words."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    return str(error) or "no answer"
