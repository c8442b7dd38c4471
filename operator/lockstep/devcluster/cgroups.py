"""Control groups: how every process of a cluster is found again, whoever started it. Version 1 and 2."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "lockstep-"
REMOVE_TIMEOUT_SECONDS = 20.0


def is_version_2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """The folders in which a group of ours has a folder: one in version 2, one a controller in version 1."""
    if is_version_2():
        return [ROOT]
    return [
        path for path in sorted(ROOT.iterdir()) if (path / "cgroup.procs").exists() and path.name != "unified" and not path.is_symlink()
    ]


def tracking() -> Path:
    """The hierarchy by which daemons are tracked."""
    return ROOT if is_version_2() else ROOT / "pids"


def create(name: str) -> None:
    """Make the group in every hierarchy, ready to take processes."""
    for hierarchy in hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        if hierarchy.name == "cpuset":  # an empty cpuset takes no process
            for key in ("cpuset.cpus", "cpuset.mems"):
                (group / key).write_text((hierarchy / key).read_text())
    if is_version_2():
        controllers = " ".join(f"+{c}" for c in (ROOT / "cgroup.controllers").read_text().split())
        (ROOT / "cgroup.subtree_control").write_text(controllers)


def join_script(name: str) -> list[str]:
    """The head of a command that puts itself into the group and then becomes the rest of the command."""
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(tracking() / name / "cgroup.procs")]


def groups(prefix: str) -> Iterator[Path]:
    """Every group whose topmost name is `prefix` or begins with `prefix-`, deepest first."""
    for hierarchy in hierarchies():
        for top in hierarchy.glob(f"{prefix}*"):
            if top.name == prefix or top.name.startswith(f"{prefix}-"):
                yield from (Path(folder) for folder, _, _ in os.walk(top, topdown=False))


def processes(prefix: str) -> set[int]:
    found: set[int] = set()
    for group in groups(prefix):
        try:
            found.update(int(pid) for pid in (group / "cgroup.procs").read_text().split())
        except (FileNotFoundError, OSError):
            continue
    return found


def kill(prefix: str) -> None:
    """Kill every process of the groups, and wait until none is left.

    Raises:
        TimeoutError: some can't be killed (stuck in the kernel); the message has their pids.
    """
    deadline = time.monotonic() + REMOVE_TIMEOUT_SECONDS
    while left := processes(prefix):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(left)} of {prefix} don't end: they may hang in the kernel (see /proc/PID/stack)")
        time.sleep(0.05)


def remove(prefix: str) -> None:
    """Remove the groups; they must be empty."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_SECONDS
    while left := list(groups(prefix)):
        for group in left:
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.02)
