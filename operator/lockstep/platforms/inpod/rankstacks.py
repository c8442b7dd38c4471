"""Asks ranks where they are: the Python stacks of all their threads. They go on as if nobody had asked.

Sent as text into whatever image a job has, and run here for jobs of this machine, so: the standard library of Python 3.10, and nothing of
Lockstep's. Ranks have prepared for it (`lockstep_gang/agent/ranks/rankstart.py`): a file in memory, whose name tells the signal by which
its process writes into it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lockstep_machine.processes import ProcessState, leads_session, process_state, rank_processes, run_dir_of
from lockstep_machine.readings import PROC

Object = dict[str, Any]
PREPARED = re.compile(r"/memfd:lockstep-stacks-(\d+)\b")
ANSWER_SECONDS = 3.0
QUIET_SECONDS = 0.1
"""Seconds without a further line after which the answer is complete."""
POLL_SECONDS = 0.02
ANSWER_BYTES_MAX = 256 * 1024
_OF_RANKS = frozenset(
    {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCKSTEP_ATTEMPT", "LOCKSTEP_NODE", "LOCKSTEP_REPORT_SOCKET", "LOCKSTEP_RUN", "RANK"}
)


def rank_processes_of(run_dir: str | None) -> list[Object]:
    """Every process that belongs to a rank, by the variables that its agent gave it. `run_dir`: of this run only."""
    ranks = []
    for folder, environment in rank_processes():
        try:
            if not environment.keys() >= _OF_RANKS or run_dir not in (None, run_dir_of(environment)):
                continue
            one = {
                "rank": int(environment["RANK"]),
                "attempt": int(environment["LOCKSTEP_ATTEMPT"]),
                "node": int(environment["LOCKSTEP_NODE"]),
            }
            one |= {"worldSize": int(environment["WORLD_SIZE"]), "ranksPerNode": int(environment["LOCAL_WORLD_SIZE"])}
            ranks.append({**one, "pid": int(folder.name), "leads": leads_session(folder), "asked": _descriptor(folder)})
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile, or is another user's
    return ranks


def _descriptor(process: Path) -> tuple[str, int] | None:
    """File to which the process writes its stacks, and the signal that makes it do so; None if it has not prepared."""
    for path in sorted((process / "fd").iterdir()):
        try:
            match = PREPARED.match(str(path.readlink()))
        except OSError:
            continue  # closed meanwhile
        if match is not None and signal.SIGRTMIN <= int(match[1]) <= signal.SIGRTMAX and process_state(process).catches(int(match[1])):
            return str(path), int(match[1])
    return None


def chosen(processes: list[Object], rank: int | None) -> list[Object]:
    """One process to ask for each rank of the newest attempt: the first that has prepared, else the one that its agent started."""
    attempt = max((one["attempt"] for one in processes), default=0)
    best: dict[int, Object] = {}
    for one in sorted(processes, key=lambda one: (one["asked"] is None, not one["leads"], one["pid"])):
        if one["attempt"] == attempt and rank in (None, one["rank"]):
            best.setdefault(one["rank"], one)
    return [best[rank] for rank in sorted(best)]


class Asking:
    """A question to one process, from the signal to its answer."""

    def __init__(self, process: Object) -> None:
        self._process = process
        self._text = b""
        self._at = 0.0
        self.problem = ""
        self._state = process_state(PROC / str(process["pid"]))
        if self._state.letter in ("T", "t"):
            self.problem = _why_silent(self._state)
        elif process["asked"] is None:
            self.problem = "it runs no Python that can be asked: another program, one with -I, -E or -S, or a start by an older Lockstep"
        self.done = bool(self.problem) or not self._send()

    def _send(self) -> bool:
        path, number = self._process["asked"]
        try:
            os.truncate(path, 0)
            os.kill(self._process["pid"], number)
        except OSError as error:
            self.problem = f"it can't be asked: {error.strerror}"
        return not self.problem

    def look(self) -> None:
        """Read the answer so far, and set `done` once it is complete."""
        try:
            with open(self._process["asked"][0], "rb") as file:  # noqa: PTH123 (a descriptor of another process)
                text = file.read(ANSWER_BYTES_MAX)
        except OSError:
            self.done, self.problem = True, "it has ended meanwhile"
            return
        if text != self._text:
            self._text, self._at = text, time.monotonic()
        elif text and time.monotonic() - self._at > QUIET_SECONDS:
            self.done = True

    def answer(self) -> Object:
        state = process_state(PROC / str(self._process["pid"])) if self._process["asked"] and not self.problem else self._state
        problem = self.problem or ("" if self._text else _why_silent(state))
        identity = {name: self._process[name] for name in ("rank", "node", "attempt", "pid")}
        return {**identity, "state": state.letter, "problem": problem, "lines": self._text.decode(errors="replace").splitlines()}


def _why_silent(state: ProcessState) -> str:
    letter = state.letter
    if letter in ("", "Z"):
        return "it has ended meanwhile"
    if letter in ("T", "t"):
        return f"its process is stopped (state {letter}): SIGCONT, or the debugger that holds it, lets it go on"
    where = f", in the kernel's {state.kernel_function}" if state.kernel_function else ""
    if letter == "D":
        return f"it can't be interrupted (state D{where}): it waits for a device or a volume that doesn't answer"
    return f"it has not answered within {ANSWER_SECONDS:.0f} s (state {letter}{where})"


def look(rank: int | None = None, run_dir: str | None = None) -> Object:
    """Process, state and stacks of each rank, as faulthandler writes them, or why there are none. Takes 4 seconds at most."""
    ranks = rank_processes_of(run_dir)
    questions = [Asking(process) for process in chosen(ranks, rank)]
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end and not all(one.done for one in questions):
        time.sleep(POLL_SECONDS)
        for one in questions:
            if not one.done:
                one.look()
    sizes = {name: max((one[name] for one in ranks), default=0) for name in ("worldSize", "ranksPerNode")}
    return {"ranks": [one.answer() for one in questions], **sizes}


if __name__ == "__main__":
    print(json.dumps(look(**json.loads(sys.argv[1]))), flush=True)
