"""Words of files (/sys, /proc), processes' starts, and users' names. Python 3.6 reads it, too."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import Any

PROC = Path("/proc")


def file_words(path: Any) -> str:
    """Return a file's text; '' of one that can't be read, such as an empty slot of a table (EINVAL)."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def folder_names(folder: Path) -> Any:
    """Return the sorted names in a folder; none of one that isn't there."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def nearest(path: Path) -> Path:
    """Return the path, or the part of it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def stat_fields(process: Path) -> Any:
    """Return the fields of the process's stat file behind its name, which may hold spaces: state, parent, process group, session and more.

    Raises OSError when it has ended.
    """
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def start_ticks(pid: int) -> Any:
    """Return the kernel's start time of a process, which no later process of the same number has; None: it has ended."""
    try:
        fields = stat_fields(PROC / str(pid))
    except OSError:
        return None
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def user_name(user: Any = None) -> str:
    """Return the login name of a user, by default of this process's; the number if it has none."""
    number = os.getuid() if user is None else user
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def byte_sizes(path: Any = PROC / "meminfo") -> Any:
    """Return the sizes that a file of /proc states in kB, such as MemTotal, in bytes by their names."""
    return {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", file_words(path), re.MULTILINE)}
