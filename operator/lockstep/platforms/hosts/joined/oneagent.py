"""The agent of this machine's node as a child process, and the signals of whoever sits at this terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.platforms.jobs.machine import END_SECONDS, write_private
from lockstep.platforms.output import leave_terminal
from lockstep_gang.contract.run import Run, run_text

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OneAgent:
    """Agent of one node. Its output is this process's. When this process is killed, it saves and stops, and removes its files."""

    def __init__(self, run: Run, node: int, key: str, folder: Path, held: int) -> None:
        """`folder`: of this user alone, for run.json and the key. `held`: a descriptor that stays open as long as the agent lives."""
        self._run, self._node, self._held = run, node, held
        self._path = folder / "run.json"
        for path in (self._path, Path(run.key_file)):
            path.unlink(missing_ok=True)
        write_private(Path(run.key_file), key)
        write_private(self._path, run_text(run))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, also after it was killed."""
        command = (sys.executable, "-m", "lockstep_gang.agent.main", "--run", str(self._path), "--node", str(self._node))
        self._process = await asyncio.create_subprocess_exec(
            *command,
            "--parent",
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(self._held,),
        )

    async def wait(self) -> int:
        """Its exit code; the negative number of the signal that ended it."""
        assert self._process is not None  # noqa: S101 (it was started)
        return await self._process.wait()

    def tell(self) -> None:
        """SIGTERM means save and stop; a second one, stop at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def end(self, seconds: float = 0.0) -> None:
        """Nothing is left when this returns: it has `seconds` to end by itself, then time to save, then some to stop."""
        if await self._has_ended(seconds):
            return
        for patience in (self._run.save_grace_seconds + END_SECONDS, END_SECONDS):
            self.tell()
            if await self._has_ended(patience):
                return
        assert self._process is not None  # noqa: S101 (it has not ended)
        self._process.kill()
        await self._process.wait()

    async def _has_ended(self, seconds: float) -> bool:
        """Return True if it ends within this time."""
        if self._process is None:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
        return self._process.returncode is not None


@contextmanager
def signals() -> Iterator[asyncio.Queue[signal.Signals]]:
    """Ctrl-C, SIGTERM and the end of the terminal, as they come, but for those that this process was started to ignore (`nohup`)."""
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
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
