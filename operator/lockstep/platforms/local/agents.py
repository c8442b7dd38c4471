"""The agents of all nodes as processes of this one: start, wait, stop."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from lockstep.platforms.output import tell

END_SECONDS = 15.0
"""Time for the other agents to end after node 0's; then they get SIGTERM, then SIGKILL."""
FAILED = 1
ENDINGS = (0, FAILED, 75)
"""An agent's codes at the end of the job, whatever that was: complete, failed, saved and stopped."""
INTERRUPTED = 130


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


class Agents:
    """One agent a node. Node 0's output is this process's, if `shown`; the others' goes to files `node-N.log` in `logs`."""

    def __init__(self, run_path: Path, nodes: int, logs: Path, *, shown: bool = True, devices: Sequence[str] = ()) -> None:
        """`devices`: CUDA_VISIBLE_DEVICES of each node; none: as this process has it."""
        self._logs = logs
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._run_path, self._shown = run_path, shown
        self._own = [{"CUDA_VISIBLE_DEVICES": names} for names in devices] or [{}] * nodes
        self._processes = [self._started(node) for node in range(nodes)]

    def wait(self) -> int:
        """Wait until node 0's agent has ended; 0 when the job is complete. Raises Interrupted.

        An agent that is killed has nobody here to replace it. That of node 0 is started again once, since it keeps the job's record: it
        goes on as restart allows, or writes down how the job ended.
        """
        gone: int | None = None
        killed = False
        while True:
            try:
                node, code = self._ended.get(timeout=None if gone is None else END_SECONDS)
            except queue.Empty:
                tell(f"lockstep: the agent of node {gone} was told to go, and the job goes on without it: stopping the job")
                return FAILED
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            if node == 0 and code < 0 and not killed:
                killed = True
                tell(f"lockstep: the agent of node 0 {how}: it is started again")
                self._processes[0] = self._started(node)
            elif node == 0:
                return 0 if code == 0 else FAILED
            elif code not in ENDINGS:  # killed from outside, or it could not start
                tell(f"lockstep: the agent of node {node} {how}, its log is {self._logs}/node-{node}.log: stopping the job")
                return FAILED
            else:
                gone = node

    def tell(self, number: signal.Signals) -> None:
        """SIGTERM means save and stop; a second one, stop at once."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait_all(self, seconds: float | None) -> bool:
        """Return True if all have ended within this time."""
        try:
            for process in self._processes:
                process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Nothing is left when this returns."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.wait_all(0):
                return
            self.tell(number)
            self.wait_all(END_SECONDS)

    def _started(self, node: int) -> subprocess.Popen[bytes]:
        logs = None if self._shown and node == 0 else self._logs
        process = self._start(self._run_path, node, logs, {**os.environ, **self._own[node]})
        threading.Thread(target=lambda: self._ended.put((node, process.wait())), daemon=True).start()
        return process

    @staticmethod
    def _start(run_path: Path, node: int, logs: Path | None, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "lockstep_gang.agent.main",
            "--run",
            str(run_path),
            "--node",
            str(node),
            "--parent",
            str(os.getpid()),
        ]
        if logs is None:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"node-{node}.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment)


def run_agents(run_path: Path, nodes: int, logs: Path, *, shown: bool = True, devices: Sequence[str] = ()) -> int:
    """The exit code: 0 complete, 1 failed, 130 interrupted. Ctrl-C lets the ranks save; a second one stops them at once."""
    with interruptible():
        agents = Agents(run_path, nodes, logs, shown=shown, devices=devices)
        try:
            code = agents.wait()
            agents.wait_all(END_SECONDS)
            return code
        except Interrupted:
            tell("", "lockstep: stopping, the ranks save first (Ctrl-C again: at once)")
            _save_and_stop(agents)
            return INTERRUPTED
        finally:
            agents.end()


def _save_and_stop(agents: Agents) -> None:
    for _ in range(2):
        agents.tell(signal.SIGTERM)
        try:
            agents.wait_all(None)
            return
        except Interrupted:
            continue


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
