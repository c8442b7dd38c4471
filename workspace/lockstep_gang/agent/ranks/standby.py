"""The next attempt's ranks, started while the gang backs off or tests its devices: they import, which is most of a start, and wait for
their order.

Only of Lockstep's trainer, which knows how to wait (`lockstep_train/standby.py`). Such a process is its rank's from the beginning: same
rank, next attempt. Where the next attempt turns out otherwise (another number, ranks in another order, a process that ended), it is killed,
and the rank is started as any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep_gang.agent.ranks.processes import send_to_group, start_process

VARIABLE = "LOCKSTEP_STANDBY"
SAME = ("RANK", "LOCKSTEP_ATTEMPT")
"""Variables by which others find a rank's processes, as the kernel shows them: an order can't change them there."""


@dataclass(frozen=True)
class StandbyProcess:
    """A process that waits: where its output is read, and where its order is written."""

    pid: int
    output: int
    order: int
    environment: Mapping[str, str]


class Standby:
    """Standby processes of one node. `prepare` after a failed attempt, `take` at the next start, `drop` when there won't be one."""

    def __init__(self) -> None:
        self._waiting: dict[int, StandbyProcess] = {}

    @property
    def leaders(self) -> Mapping[int, StandbyProcess]:
        """Processes by id."""
        return self._waiting

    def prepare(self, command: Sequence[str], folder: str, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one for each rank of the attempt that has ended, or would have been the one before, whose variables these are. One that
        can't be started is left out.
        """
        self.drop()
        for ended in environments:
            environment = {**ended, VARIABLE: "1", "LOCKSTEP_ATTEMPT": str(int(ended["LOCKSTEP_ATTEMPT"]) + 1)}
            with contextlib.suppress(OSError):
                process = _started(command, folder, environment)
                self._waiting[process.pid] = process

    def take(self, environment: Mapping[str, str]) -> tuple[int, int] | None:
        """(process id, where its output is read) of the one that is this rank by now; None: there is none."""
        process = next((w for w in self._waiting.values() if all(w.environment[name] == environment.get(name) for name in SAME)), None)
        if process is None:
            return None
        del self._waiting[process.pid]
        if _ordered(process, environment):
            return process.pid, process.output
        _kill(process)
        return None

    def ended(self, pid: int) -> None:
        """Forget a process that has ended before its time; the rank's own start will say why."""
        process = self._waiting.pop(pid, None)
        if process is not None:
            _close(process)

    def drop(self) -> None:
        for process in self._waiting.values():
            _kill(process)
        self._waiting.clear()


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Changes that make one environment the other; None: the variable goes."""
    gone: dict[str, str | None] = {name: None for name in before if name not in after}
    return {**gone, **{name: value for name, value in after.items() if before.get(name) != value}}


def _started(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> StandbyProcess:
    reads_order, order = os.pipe()
    output, writes_output = os.pipe()
    os.set_blocking(order, False)
    os.set_blocking(output, False)
    try:
        pid = start_process(command, folder, environment, writes_output, reads_order)
    except OSError:
        os.close(order)
        os.close(output)
        raise
    finally:
        os.close(reads_order)
        os.close(writes_output)
    return StandbyProcess(pid, output, order, environment)


def _ordered(process: StandbyProcess, environment: Mapping[str, str]) -> bool:
    """Send the order: a few variables, far less than a pipe holds. True if it was written; if the process has just ended, its exit
    tells.
    """
    order = {"given": time.monotonic(), "environment": changes(process.environment, environment)}
    line = json.dumps(order).encode() + b"\n"
    try:
        written = os.write(process.order, line)
    except OSError:
        return False
    if written == len(line):
        os.close(process.order)
    return written == len(line)


def _kill(process: StandbyProcess) -> None:
    send_to_group(process.pid, signal.SIGKILL)
    _close(process)


def _close(process: StandbyProcess) -> None:
    os.close(process.order)
    os.close(process.output)
