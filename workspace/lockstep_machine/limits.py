"""Memory and cores that this process may use: of its machine, and of its control groups (version 1 or 2)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from lockstep_machine.readings import file_words

UNLIMITED = 1 << 60


def control_groups(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield a control group (version 1 or 2) and those around it: where `own` says that it is mounted, else, in a container, at the
    root.
    """
    for line in file_words(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (groups / controller,) if controllers else (groups, groups / "unified"):
            folder = mount / path.lstrip("/")
            yield from (above for above in (folder, *folder.parents) if above.is_relative_to(groups))
    yield groups
    yield groups / controller


def memory_limit(group: Path) -> int | None:
    """Return the limit of a control group in bytes; None: there is none, for which version 1 writes the largest number of pages."""
    texts = (file_words(group / name) for name in ("memory.max", "memory.limit_in_bytes"))
    return next((int(text) for text in texts if text.isdigit() and int(text) < UNLIMITED), None)


def cores() -> int:
    """Return the machine's CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(root: Path = Path("/")) -> float:
    """Return the cores that this process may use at once: those of its affinity, and no more than any of its control groups allows."""
    groups = control_groups("cpu", root / "sys/fs/cgroup", root / "proc/self/cgroup")
    return min(cores(), *map(_core_limit, groups))


def _core_limit(group: Path) -> float:
    """Return the limit of a control group (version 2 or 1) in cores; infinity where there is none: no file, or one that says max or -1."""
    quota, period = (*file_words(group / "cpu.max").split(), "", "")[:2]
    if not quota:
        quota, period = (file_words(group / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else math.inf
