"""Faults that `lockstep drill` causes where ranks run. Arguments are the run's folder, a verb and its options as JSON; answers are JSON,
one a line.

A verb that goes on depends on its standard input: whoever asked for it writes something there now and then. When that ends, or nothing
comes any more, the verb undoes what it did and ends, so that a laptop that is shut leaves no frozen rank and no full volume.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep_machine.processes import leads_session, process_state, rank_processes, run_dir_of
from lockstep_machine.readings import PROC, stat_fields
from lockstep_machine.wire import Asker

FILLER = "drill-fill"
WATCH_SECONDS = 0.05
STOPPED, ENDED = "T", ("", "Z")
COMMIT = re.compile(r"step-(\d+)\.a(\d+)")


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _command() -> Asker:
    """Return the command that started this verb. Nothing is buffered, so that no lock is held at the verb's end."""
    return Asker(open(0, "rb", buffering=0, closefd=False))


def run_dir() -> Path:
    return Path(sys.argv[1])


def processes() -> list[dict[str, int]]:
    """Every process that belongs to a rank of the run: its id, rank, attempt, and whether the agent started it itself."""
    ranks = []
    for folder, environment in rank_processes():
        with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
            if "LOCKSTEP_REPORT_SOCKET" in environment and run_dir_of(environment) == str(run_dir()):
                rank, attempt = int(environment["RANK"]), int(environment["LOCKSTEP_ATTEMPT"])
                ranks.append({"pid": int(folder.name), "rank": rank, "attempt": attempt, "leads": int(leads_session(folder))})
    return ranks


def leader(rank: int) -> int:
    """Process of the rank itself, not one of its workers."""
    for process in processes():
        if process["rank"] == rank and process["leads"]:
            return process["pid"]
    sys.exit(f"there is no process of rank {rank} here")


def hit(rank: int, number: int) -> None:
    """Send the rank's process a signal."""
    os.kill(leader(rank), number)
    say(hit=rank)


def lose(rank: int) -> None:
    """End the rank's agent at once, which leaves nobody to end its ranks in order."""
    os.kill(int(stat_fields(PROC / str(leader(rank)))[1]), signal.SIGKILL)
    say(hit=rank)


def freeze(rank: int) -> None:
    """Stop the rank's process for as long as somebody listens, or until it is killed."""
    command, pid = _command(), leader(rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        while state_letter(pid) not in (STOPPED, *ENDED):  # it stops when it next leaves the kernel
            time.sleep(WATCH_SECONDS)
        say(hit=rank)
        while not command.is_gone and state_letter(pid) not in ENDED:
            time.sleep(WATCH_SECONDS)
    finally:
        let_go_on(pid)


def state_letter(pid: int) -> str:
    """Return the letter of the state that the kernel gives the process; '' when it has ended."""
    return process_state(PROC / str(pid)).letter


def let_go_on(pid: int) -> bool:
    """Let the process go on, and return True if it was stopped. Another process that has its number by now isn't, and is left alone."""
    if state_letter(pid) != STOPPED:
        return False
    os.kill(pid, signal.SIGCONT)
    return True


def thaw(rank: int) -> None:
    """Let the rank's process go on, if it is stopped."""
    say(thawed=let_go_on(leader(rank)))


def watch(attempt: int, seconds: float) -> None:
    """Say when nothing of the attempt runs here any more, and when something of a later one does."""
    command = _command()
    say(watching=attempt)
    end, stopped = time.monotonic() + seconds, False
    while time.monotonic() < end and not command.is_gone:
        attempts = {process["attempt"] for process in processes()}
        if not stopped and attempt not in attempts:
            stopped = True
            say(stopped=attempt)
        if stopped and any(other > attempt for other in attempts):
            say(started=max(attempts))
            return
        time.sleep(WATCH_SECONDS)


def commits() -> list[tuple[int, int, Path]]:
    """Attempt, step and folder of every commit, the newest last."""
    folders = (run_dir() / "checkpoints").glob("step-*")
    named = ((COMMIT.fullmatch(folder.name), folder) for folder in folders if (folder / "manifest.json").exists())
    return sorted((int(match[2]), int(match[1]), folder) for match, folder in named if match)


def corrupt(rank: int) -> None:
    """Change some bytes in the middle of the newest commit's largest shard, then kill the rank before there is a newer one."""
    pid, committed = leader(rank), commits()
    if len(committed) < 2:
        sys.exit(f"there are {len(committed)} commits, and this needs 2: the damaged one, and the one before it to go back to")
    _, step, folder = committed[-1]
    shard = max(folder.glob("shard-*"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as file:
        middle = shard.stat().st_size // 2
        file.seek(middle)
        before = file.read(64)
        file.seek(middle)
        file.write(bytes(byte ^ 0xFF for byte in before))
        file.flush()
        os.fsync(file.fileno())
    os.kill(pid, signal.SIGKILL)
    say(hit=rank, damaged=str(shard), step=step)


def started_from(attempt: int) -> None:
    """Print which commit the attempt began with, by its own record; null: none is written yet, or it began anew."""
    for path in (run_dir() / "checkpoints" / "chain").glob("a*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("given") == attempt:
            match = COMMIT.search(record["start"] or "")
            say(record=path.name, start=record["start"], step=int(match[1]) if match else 0)
            return
    say(record=None, start=None, step=None)


def fill(most: int, seconds: float) -> None:
    """Leave no room on the volume of the run's folder until the file is removed, or for so long. More than `most` bytes are never
    written.
    """
    folder = run_dir()
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free > most:
        sys.exit(f"the volume has {free >> 20} MiB free, and no more than {most >> 20} are to be written")
    path, end, command = folder / FILLER, time.monotonic() + seconds, _command()
    try:
        with path.open("wb", buffering=0) as file:
            grow(file.fileno(), most)
            say(full=True, bytes=os.fstat(file.fileno()).st_size)
            while time.monotonic() < end and path.exists() and not command.is_gone:
                grow(file.fileno(), most)  # what rotation frees meanwhile
                time.sleep(0.2)
    finally:
        path.unlink(missing_ok=True)
    say(full=False)


def grow(descriptor: int, most: int) -> None:
    for size in (1 << 20, 4096):
        try:
            while os.fstat(descriptor).st_size < most:
                os.write(descriptor, bytes(size))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


def empty() -> None:
    """Remove the file that `fill` writes: it sees that, and ends."""
    (run_dir() / FILLER).unlink(missing_ok=True)
    say(full=False)


VERBS: dict[str, Callable[..., None]] = {
    "hit": hit,
    "lose": lose,
    "freeze": freeze,
    "thaw": thaw,
    "watch": watch,
    "corrupt": corrupt,
    "started_from": started_from,
    "fill": fill,
    "empty": empty,
}

if __name__ == "__main__":
    VERBS[sys.argv[2]](**json.loads(sys.argv[3]))
