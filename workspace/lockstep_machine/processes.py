"""Processes by the kernel's files: their state, and those of ranks, found by the variables that their agent gave them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep_machine.readings import PROC, file_words, stat_fields


@dataclass(frozen=True)
class ProcessState:
    """State of a process, by the kernel; empty where there is no /proc, or no such process."""

    letter: str = ""
    kernel_function: str = ""
    """Function of the kernel in which it waits."""
    caught: int = 0
    """Signals that it handles, as a mask."""

    def catches(self, number: int) -> bool:
        """Return True if it handles the signal."""
        return bool(self.caught >> (number - 1) & 1)


def process_state(process: Path) -> ProcessState:
    """Return the state of a process or of a thread, by its folder."""
    fields = dict(line.partition(":")[::2] for line in file_words(process / "status").splitlines())
    function = file_words(process / "wchan")
    return ProcessState(
        fields.get("State", "").strip()[:1], "" if function == "0" else function, int(fields.get("SigCgt", "0").strip() or "0", 16)
    )


def rank_processes(proc: Path = PROC) -> Iterator[tuple[Path, dict[str, str]]]:
    """Folder in `proc` and environment of every process that belongs to a rank. A rank of the next attempt that has not started is left
    out.
    """
    for folder in proc.glob("[0-9]*"):
        try:
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it ended meanwhile, or is another user's
        environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if (
            environment.get("RANK", "").isdecimal()
            and environment.get("LOCKSTEP_ATTEMPT", "").isdecimal()
            and not _stands_by(folder, environment)
        ):
            yield folder, environment


def _stands_by(process: Path, environment: dict[str, str]) -> bool:
    """Return True if the process imports ahead for the next attempt and waits for its order on standard input."""
    try:
        return "LOCKSTEP_STANDBY" in environment and str((process / "fd" / "0").readlink()).startswith("pipe:")
    except OSError:
        return False


def run_dir_of(environment: Mapping[str, str]) -> str:
    """Folder of the run that a rank belongs to; '' if it can't be read."""
    try:
        return str(json.loads(Path(environment["LOCKSTEP_RUN"]).read_text(encoding="utf-8"))["runDir"])
    except (KeyError, TypeError, OSError, ValueError, RecursionError):
        return ""


def leads_session(process: Path) -> bool:
    """Return True if the process is the one that the agent started, not one that came of it. Raises OSError, IndexError when it has
    ended.
    """
    return bool(stat_fields(process)[3] == process.name)
