"""Processes of ranks, found by the variables that their agent gave them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

PROC = Path("/proc")


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
    return _stat(process)[3] == process.name


def parent_of(pid: int) -> int:
    """Process that started this one. Raises OSError, IndexError when it has ended."""
    return int(_stat(PROC / str(pid))[1])


def state_letter(pid: int) -> str:
    """Letter of the state that the kernel gives the process; '' when it has ended."""
    try:
        return _stat(PROC / str(pid))[0]
    except (OSError, IndexError):
        return ""


def _stat(process: Path) -> list[str]:
    """Fields of the process's stat file behind its name, which may hold spaces: state, parent, process group, session and more."""
    return (process / "stat").read_text().rpartition(")")[2].split()
