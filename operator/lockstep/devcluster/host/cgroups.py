"""Control groups: how every process of a cluster is found again, whoever started it. Version 1 and 2."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
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


def unified() -> Path | None:
    """Folder of the groups of version 2, which machines with version 1 may have beside it; None: it isn't mounted."""
    return next((folder for folder in (ROOT, ROOT / "unified") if (folder / "cgroup.controllers").exists()), None)


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


def create_tracking(name: str) -> Path:
    """Make a group that only says which processes belong together; the file that takes their ids."""
    group = tracking() / name
    group.mkdir(parents=True, exist_ok=True)
    return group / "cgroup.procs"


def of_cluster(name: str) -> list[str]:
    """The topmost groups of the cluster `name`: its daemons', and its nodes'."""
    form = re.compile(rf"lockstep-{re.escape(name)}(-\d+)?")
    return sorted({group.name for hierarchy in hierarchies() for group in hierarchy.glob("lockstep-*") if form.fullmatch(group.name)})


def others(name: str) -> set[str]:
    """The topmost groups of clusters other than `name`, also of one that is just coming up."""
    return {group.name for group in tracking().glob("lockstep-*")} - set(of_cluster(name))


def _all(*names: str) -> Iterator[Path]:
    """These groups and the groups in them, in every hierarchy, deepest first; in that of version 2 a host's systemd makes its own."""
    for hierarchy in filter(None, dict.fromkeys([*hierarchies(), unified()])):
        for name in names:
            yield from (Path(folder) for folder, _, _ in os.walk(hierarchy / name, topdown=False))


def processes(*names: str) -> set[int]:
    found: set[int] = set()
    for group in _all(*names):
        try:
            found.update(int(pid) for pid in (group / "cgroup.procs").read_text().split())
        except OSError:  # removed meanwhile
            continue
    return found


def kill(*names: str) -> None:
    """Kill every process of these groups and of groups in them, and wait until none is left.

    Raises:
        TimeoutError: some can't be killed (stuck in the kernel); the message has their pids.
    """
    deadline = time.monotonic() + REMOVE_TIMEOUT_SECONDS
    while left := processes(*names):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(left)} don't end: they may hang in the kernel (see /proc/PID/stack)")
        time.sleep(0.02)


def remove(*names: str) -> None:
    """Remove these groups and the groups in them; kill every process that is, or still comes, in them.

    Raises:
        TimeoutError: some can't be killed (stuck in the kernel); the message has their pids.
        OSError: a group without a process can't be removed; the message has its path.
    """
    deadline = time.monotonic() + REMOVE_TIMEOUT_SECONDS
    while left := list(_all(*names)):
        kill(*names)
        for group in left:
            try:
                group.rmdir()
            except FileNotFoundError:
                continue
            except OSError:  # the kernel still buries a process, or one was just born
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.02)
