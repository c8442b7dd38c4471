"""A short run on a host: an agent that runs for as long as somebody asks for it, and of which nothing stays.

`brief` takes files as a start does. The agent's lines come as `{"line": …}`, its end as `{"ended": code}`. All that it had is removed on
the line `done`, and when the other end goes away or falls silent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import BinaryIO, TextIO

from lockstep.platforms.onhost.exchange import Declined, Json, answer, write
from lockstep.platforms.onhost.readings import alone, state_folder
from lockstep.platforms.onhost.sweep import BRIEF, MEASURED, held, sweep
from lockstep_machine.readings import start_ticks
from lockstep_machine.wire import SILENCE_SECONDS, Asker

END_SECONDS = 10.0
QUIET_SECONDS = 1.0


def brief(request: Json, stream: BinaryIO) -> Json:
    """Run the agent of a job that leaves nothing, until somebody says `done` or goes away. Its files are in the folder `folder` of the
    state folder.
    """
    folder = Path(request["folder"])
    measured = None if request["forget"] is None else Path(request["forget"])
    if folder.parent != state_folder() or not BRIEF.fullmatch(folder.name) or (measured and not measured.name.startswith(MEASURED)):
        raise Declined(f"{folder} is no folder for a short run")
    process, ticks, lock = None, None, None
    asker = Asker(stream)
    signal.signal(signal.SIGTERM, asker.leave)
    try:
        for needed in (folder.parent, *map(Path, request["folders"])):
            needed.mkdir(parents=True, exist_ok=True)
        with alone():
            sweep()
            folder.mkdir(mode=0o700)
            lock = held(folder)
        for name, data in request["files"].items():
            write(folder / name, data)
        answer({"placed": True})
        if asker.says(b"go", SILENCE_SECONDS):
            command = [*request["command"], "--parent", str(os.getpid())]
            process = subprocess.Popen(
                command, env={**os.environ, **request["environment"]}, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(lock.fileno(),),
            )  # fmt: skip
            ticks = start_ticks(process.pid)
            threading.Thread(target=pass_lines, args=(process,), daemon=True).start()
            while not asker.says(b"done", 0.5):
                if asker.is_gone:
                    break
    finally:
        clear_away(None if process is None else process.pid, ticks, [folder, *([measured] if measured else [])], lock)
    return {"removed": True}


def pass_lines(process: subprocess.Popen[bytes]) -> None:
    """Pass the agent's lines on, and how it ended."""
    assert process.stdout is not None  # noqa: S101 (it is a pipe)
    for line in process.stdout:
        answer({"line": line.decode(errors="replace").rstrip("\n")})
    answer({"ended": process.wait()})


def clear_away(pid: int | None, ticks: int | None, folders: list[Path], lock: TextIO | None) -> None:
    """End the agent `pid` that started at `ticks`, and remove the folders. A process of its own does it, which nobody ends before it
    has.
    """
    cleaner = os.fork()
    if cleaner:
        if lock is not None:
            lock.close()
        os.waitpid(cleaner, 0)
        return
    os.setsid()
    with contextlib.suppress(BaseException):
        if pid is not None and ticks is not None:
            end_agent(pid, ticks)
        if lock is not None:
            lock.close()  # (a network file system would keep the folder for a file that is open)
        end = time.monotonic() + END_SECONDS
        quiet = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < min(quiet, end):  # a rank that ends may bring its folder back
            for folder in folders:
                if folder.exists():
                    shutil.rmtree(folder, ignore_errors=True)
                    quiet = time.monotonic() + QUIET_SECONDS
            time.sleep(0.05)
    os._exit(0)


def end_agent(pid: int, ticks: int) -> None:
    """Let the agent end its ranks without a save, and kill it if it doesn't. (Two of SIGTERM mean at once.)"""
    for number, patience in ((signal.SIGTERM, 0.2), (signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        if start_ticks(pid) != ticks:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        end = time.monotonic() + patience
        while start_ticks(pid) == ticks and time.monotonic() < end:
            time.sleep(0.05)
