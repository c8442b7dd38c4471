"""State of a rank before it is killed: its process's, and the Python stacks of all its threads.

Lockstep's trainer writes them by itself when it gets SIGUSR2, with NCCL's last operations. Any other Python has faulthandler, which every
rank is started with: it writes them on SIGABRT, whatever holds the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep_gang.agent.ranks.processes import send
from lockstep_gang.contract.messages import Dumped
from lockstep_gang.lifecycle.hang import STOPPED
from lockstep_machine.processes import ProcessState, process_state
from lockstep_machine.readings import PROC, stat_fields
from lockstep_spec.files import read_regular, write_new

WRITE_SECONDS = 1.0
"""Time that a volume may take to write one file; what hangs may be the volume."""
SOURCE_BYTES_MAX = 4 * 1024 * 1024
"""Largest script of which one line is looked at."""
HANGS = 3
"""The newest attempts whose files stay on the volume; a job may be started again a thousand times."""
STACKS_BYTES = 512 * 1024 * 1024
"""Size of all ranks' stacks together,"""
FILE_BYTES = 1024 * 1024
"""and of one rank's at most."""
_FILES = re.compile(r"(?:hang|nccl)-attempt-(\d+)-rank-\d+\.(?:txt|json)")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_COLLECTIVE = re.compile(r"torch/distributed/|deepspeed/comm/|torch/nn/parallel/distributed|mpi4py|horovod")
_DEVICE_WAIT = re.compile(r"\.(item|tolist|cpu|numpy)\(|\bsynchronize\(")
"""Calls that wait until a GPU has done what is queued, collective operations among it. They have no frames of their own."""
_DEEP = 12
"""Frames from the innermost one on in which a collective operation is looked for."""


def state_after_kill(leader: int) -> ProcessState:
    """State of what is left of a rank: of its thread that can't be interrupted, if there is one, else of its process."""
    threads = (process_state(thread) for pid in _group(leader) for thread in (PROC / str(pid) / "task").glob("[0-9]*"))
    return next((state for state in threads if state.letter == "D"), None) or process_state(PROC / str(leader))


def python_process(leader: int) -> int:
    """The first Python process of a rank's process group: a rank may be a shell script that starts it."""
    for pid in sorted(_group(leader), key=lambda pid: (pid != leader, pid)):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/exe").readlink().name.startswith("python"):
                return pid
    return leader


def _group(leader: int) -> list[int]:
    members = [leader]
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            if stat_fields(folder)[2] == str(leader) != folder.name:
                members.append(int(folder.name))
    return members


def ask_for_stacks(leader: int, trainer: bool) -> ProcessState:
    """Send the signal that makes a rank write its stacks, to no process that would only die of it. Returns the state before."""
    pid = python_process(leader)
    state = process_state(PROC / str(pid))
    if trainer and state.catches(signal.SIGUSR2) and state.letter not in STOPPED:
        send(pid, signal.SIGUSR2)
    elif state.catches(signal.SIGABRT):
        abort(pid, state)
    return state


def abort(pid: int, state: ProcessState) -> None:
    """Send SIGABRT without a core dump: one of a rank's size would take minutes. A stopped process is let go on to receive it."""
    if hasattr(os, "pidfd_open"):
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (1, 1))  # 0 would still feed a core_pattern that is a pipe; 1 doesn't
    send(pid, signal.SIGABRT)
    if state.letter in STOPPED:
        send(pid, signal.SIGCONT)


def dumped(attempt: int, rank: int, state: ProcessState, lines: Sequence[str], stacks: str | None) -> Dumped:
    """Message about the rank. `lines`: what it wrote since it was asked."""
    frames = main_thread(lines)
    waits = any(_COLLECTIVE.search(frame["file"]) for frame in frames[:_DEEP]) or _waits_for_device(frames)
    own = next((f for f in frames if not _COLLECTIVE.search(f["file"]) and "/torch/" not in f["file"]), frames[0] if frames else None)
    at = f"{own['function']} ({Path(own['file']).name}:{own['line']})" if own is not None else ""
    return Dumped(attempt, rank, state.letter, state.kernel_function, at[:300], waits, stacks)


def _waits_for_device(frames: Sequence[Mapping[str, str]]) -> bool:
    if not frames:
        return False
    innermost = frames[0]
    if "/torch/cuda/" in innermost["file"]:
        return innermost["function"] == "synchronize"
    return _DEVICE_WAIT.search(_source_line(innermost["file"], int(innermost["line"]))) is not None


def _source_line(path: str, number: int) -> str:
    """Line of a source, empty if it can't be read in time. Read by a thread, since what hangs may be the volume that the script is on."""
    source: list[str] = []

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):  # a path as the rank wrote it
            lines = read_regular(Path(path), SOURCE_BYTES_MAX, follow=True).splitlines()
            source.extend(line.decode(errors="replace") for line in lines[number - 1 : number])

    thread = threading.Thread(target=read, name="source", daemon=True)
    thread.start()
    thread.join(WRITE_SECONDS)
    return source[0] if source else ""


def main_thread(lines: Sequence[str]) -> list[dict[str, str]]:
    """Frames of the main thread in faulthandler's words, the innermost first: it comes last of all threads, as the oldest."""
    frames: list[dict[str, str]] = []
    for line in lines:
        match = _FRAME.match(line)
        if match is not None:
            frames.append(match.groupdict())
        elif line.lstrip().startswith(("Thread 0x", "Current thread 0x")):
            frames = []
    return frames


def write_stacks(path: Path, head: str, lines: Sequence[str]) -> str | None:
    """The file's path, once it is there; None when that takes too long or fails. What the rank itself has put there stays.

    By a thread: a volume that hangs must not stop the agent.
    """
    done = threading.Event()

    def put() -> None:
        with contextlib.suppress(OSError):
            if lines or not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                text = "\n".join([head, *(lines or ["no Python stacks: the process did not write any"])]) + "\n"
                write_new(path, text.encode("utf-8", "backslashreplace"))
            done.set()

    threading.Thread(target=put, name="stacks", daemon=True).start()
    return str(path) if done.wait(WRITE_SECONDS) else None


def stack_path(run_dir: str, attempt: int, rank: int) -> Path:
    return Path(run_dir) / "logs" / f"hang-attempt-{attempt}-rank-{rank}.txt"


def remove_old(logs: Path) -> None:
    """Remove what ranks wrote when they hung, but for the newest attempts. May take as long as the volume does; never raises."""
    files: dict[int, list[Path]] = {}
    with contextlib.suppress(OSError):
        for path in logs.iterdir():
            match = _FILES.fullmatch(path.name)
            if match is not None:
                files.setdefault(int(match[1]), []).append(path)
    for attempt in sorted(files)[:-HANGS]:
        for path in files[attempt]:
            with contextlib.suppress(OSError):  # another agent was faster
                path.unlink()


def shortened(lines: Sequence[str], ranks: int) -> list[str]:
    """Part of a rank's stacks that goes into its file, in a gang of so many ranks: the newest, since the main thread comes last."""
    left = min(FILE_BYTES, STACKS_BYTES // ranks)
    first = len(lines)
    while first and left >= len(lines[first - 1]) + 1:
        first -= 1
        left -= len(lines[first]) + 1
    return [f"{first} lines left out", *lines[first:]] if first else list(lines)


def head_line(rank: int, node: int, attempt: int, pid: int, state: ProcessState) -> str:
    words = {
        "T": "stopped",
        "t": "held by a debugger",
        "D": "can't be interrupted, waits for a device",
        "S": "waits",
        "R": "runs",
        "Z": "has ended",
    }
    where = f", in the kernel's {state.kernel_function}" if state.kernel_function else ""
    text = f"{words.get(state.letter, 'state')} ({state.letter}){where}" if state.letter else "state not known"
    return f"rank {rank} on node {node}, attempt {attempt}, process {pid}: {text}"
