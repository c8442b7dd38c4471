"""Remains of a power cut in the folder of all jobs: drafts of starts and folders of short runs. They may hold a key, and only whoever comes
later can remove them.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import time
from pathlib import Path
from typing import TextIO

from lockstep.platforms.onhost.readings import object_in, state_folder

OLD_SECONDS = 3600.0
"""Age of a draft that no start has any more, since each waits for minutes at most."""
UNHELD_SECONDS = 86400.0
"""Age of a short run's folder without ALIVE that is over: an earlier Lockstep made it, or its host lost power just then."""
BRIEF = re.compile(r"\.[a-z0-9][-a-z0-9]{0,62}\.[0-9a-f]{12}")
"""Name of a short run's folder."""
MEASURED = ".measured-"
"""Beginning of the name of a run's folder that is removed with a short run."""
ALIVE = "alive"
"""File in a short run's folder that is locked as long as the run goes on. The kernel unlocks it, however the run ends."""


def held(folder: Path) -> TextIO:
    """Lock a short run's folder against `sweep` until the file that is returned is closed in every process that has it."""
    lock = (folder / ALIVE).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def sweep() -> None:
    """Remove what power cuts have left of any job, within `alone`: then no start is between two names, and no short run before its lock."""
    for left in [*state_folder().glob("..*"), *state_folder().glob(".*.start.*")]:
        if left.name.startswith("..") or age(left) > OLD_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    briefs = [path for path in state_folder().glob(".*.*") if BRIEF.fullmatch(path.name)]
    over = [path for path in briefs if is_over(path)]
    in_use = {run_dir(path) for path in briefs if path not in over}
    for left in over:
        folder = run_dir(left)
        if folder.name.startswith(MEASURED) and folder not in in_use:
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(left, ignore_errors=True)


def is_over(folder: Path) -> bool:
    """Return True if no process has a short run's folder any more, on this host or on another one that shares it."""
    try:
        with (folder / ALIVE).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return age(folder) > UNHELD_SECONDS
    except OSError:  # (locked; or nobody can know)
        return False


def run_dir(folder: Path) -> Path:
    """Folder of the run that a short run's folder describes."""
    return Path(str(object_in(folder / "run.json").get("runDir", "")))


def age(path: Path) -> float:
    """Seconds since something in the folder was made or removed; 0 if it has just gone."""
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0
