"""Agents of nodes as children of this process, and the signals of the person at its terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lockstep.platforms.output import leave_terminal, tell
from lockstep_gang.contract.run import Run, run_text
from lockstep_spec.exits import FAILED, INTERRUPTED, SAVED
from lockstep_spec.files import write_durably

END_SECONDS = 15.0
"""Time for the other agents to end after node 0's; then they get SIGTERM, then SIGKILL."""
ENDINGS = (0, FAILED, SAVED)
"""An agent's codes at the end of the job, whatever that was: complete, failed, saved and stopped."""
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(NamedTuple):
    """End of an agent: its exit code, or the negative number of the signal that ended it."""

    agents: Agents
    node: int
    code: int

    @property
    def how(self) -> str:
        return f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with {self.code}"


News = asyncio.Queue[signal.Signals | Ended]


def write_run(run: Run, key: str) -> Path:
    """Write run.json beside its key's file, in a folder of this user alone, in place of those of an earlier start. Return its path."""
    path = Path(run.key_file).with_name("run.json")
    for file, text in ((Path(run.key_file), key), (path, run_text(run))):
        write_durably(file, text.encode(), 0o600)
    return path


@dataclass
class Agents:
    """An agent for each of some nodes. When this process is killed, they save and stop, and remove their files."""

    run_path: Path
    news: News
    """Each agent's end goes there."""
    nodes: Sequence[int] = (0,)
    logs: Path | None = None
    """Folder of the files `node-N.log` that get their output; None: it is this process's, as that of node 0 is if it is `shown`."""
    shown: bool = True
    devices: Sequence[str] = ()
    """CUDA_VISIBLE_DEVICES of each node; none: as this process has it."""
    held: Sequence[int] = ()
    """Descriptors that stay open as long as an agent lives."""
    save_seconds: float = 0.0
    """Seconds for which one that is told to end may save."""
    _processes: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)
    _watching: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        for node in self.nodes:
            await self.start_one(node)

    async def start_one(self, node: int) -> None:
        """Start the agent of a node, also after it was killed."""
        own = {"CUDA_VISIBLE_DEVICES": self.devices[node]} if self.devices else {}
        words = ("--run", str(self.run_path), "--node", str(node), "--parent", str(os.getpid()))
        with contextlib.ExitStack() as stack:
            output = None
            if self.logs is not None and not (self.shown and node == 0):
                self.logs.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context((self.logs / f"node-{node}.log").open("wb"))
            process = self._processes[node] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "lockstep_gang.agent.main", *words, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **own}, start_new_session=True, pass_fds=self.held,
            )  # fmt: skip
        watching = asyncio.ensure_future(self._watch(node, process))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)

    async def _watch(self, node: int, process: asyncio.subprocess.Process) -> None:
        self.news.put_nowait(Ended(self, node, await process.wait()))

    async def run(self, hear: Callable[[bool], None] = lambda now: None, *, signaled: bool = False, saves: bool = True) -> int:
        """Start them, and wait for the end of the job. Return 0 complete, 1 failed, 130 interrupted; then none of them is left.

        The first signal lets the ranks save, if `saves`, and the second stops them at once; `hear` is told which. `signaled`: what signals
        this process signals the agents.
        """
        patience = 0.0
        try:
            await self.start()
            code = await self._follow(hear, signaled=signaled, most=2 if saves else 0)
            patience = 0.0 if code == INTERRUPTED else END_SECONDS
            return code
        finally:
            await self.end(patience)

    async def _follow(self, hear: Callable[[bool], None], *, signaled: bool, most: int) -> int:
        """Wait for the end of the job, or more than `most` signals.

        An agent that is killed has nothing here to replace it. That of node 0 is started again once, since it keeps the job's record: it
        goes on as restart allows, or writes down how the job ended.
        """
        stops, was_killed, gone = 0, False, None
        while stops <= most:
            try:
                async with asyncio.timeout(None if gone is None or stops else END_SECONDS):
                    news = await self.news.get()
            except TimeoutError:
                tell(f"lockstep: the agent of node {gone} was stopped, but the job goes on without it: stopping the job")
                return FAILED
            if isinstance(news, signal.Signals):
                stops += 1
                if stops == 1 <= most:
                    tell("", "lockstep: stopping, the ranks save first (Ctrl-C again: at once)")
                hear(stops > 1)
                if stops > 1 or not signaled:
                    self.tell()
            elif stops:
                if not self._running:
                    break
            elif news.node == 0 and news.code < 0 and not was_killed:
                was_killed = True
                tell(f"lockstep: the agent of node 0 {news.how}: it is started again")
                await self.start_one(0)
            elif news.node == 0:
                return 0 if news.code == 0 else FAILED
            elif news.code not in ENDINGS:  # killed from outside, or it could not start
                tell(f"lockstep: the agent of node {news.node} {news.how}, its log is {self.logs}/node-{news.node}.log: stopping the job")
                return FAILED
            else:
                gone = news.node
        return INTERRUPTED

    @property
    def _running(self) -> list[asyncio.subprocess.Process]:
        return [process for process in self._processes.values() if process.returncode is None]

    def tell(self, number: signal.Signals = signal.SIGTERM) -> None:
        """SIGTERM means save and stop; a second one, stop at once."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):  # (not send_signal: it reaps one that has just ended, and asyncio then warns)
                os.kill(process.pid, number)

    async def end(self, seconds: float = 0.0) -> None:
        """Nothing is left when this returns: they have `seconds` to end by themselves, then time to save, then some to stop."""
        if await self._end_within(seconds):
            return
        for number, patience in ((signal.SIGTERM, self.save_seconds), (signal.SIGTERM, 0.0), (signal.SIGKILL, 0.0)):
            self.tell(number)
            if await self._end_within(patience + END_SECONDS):
                return

    async def _end_within(self, seconds: float) -> bool:
        """Return True if all end within this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(process.wait() for process in self._running))
        return not self._running


@contextmanager
def signals() -> Iterator[News]:
    """Ctrl-C, SIGTERM and the end of the terminal, as they come, but for those that this process was started to ignore (`nohup`)."""
    loop = asyncio.get_running_loop()
    received: News = asyncio.Queue()
    before = {number: handler for number in NUMBERS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}

    def take(number: signal.Signals) -> None:
        if number is signal.SIGHUP:
            leave_terminal()
        received.put_nowait(number)

    for number in before:
        loop.add_signal_handler(number, take, number)
    try:
        yield received
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
