"""Memory of a rank's device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_bytes(device: torch.device, ranks_per_node: int) -> int | None:
    """All of a GPU's memory, or this rank's share of the memory that its container or machine has; None when nothing says it."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    host = host_bytes()
    return None if host is None else host // ranks_per_node


def host_bytes(root: Path = Path("/")) -> int | None:
    """The least of the machine's memory and of every limit of this process's control groups, version 1 and 2."""
    limits = [limit for limit in (_machine(root), *_group_limits(root)) if limit is not None]
    return min(limits, default=None)


def own_bytes(rollup: Path = Path("/proc/self/smaps_rollup")) -> int:
    """Memory that this process alone has and no file can give back, its part of what it shares; 0 when nothing says it."""
    for line in _read(rollup).splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0


def _machine(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _group_limits(root: Path) -> list[int]:
    """Limits of this group and all around it. In a container the own group is the root of what is mounted, whatever its path is said to be."""
    limits: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = mount / path.strip("/")
        folders = [mount, *(folder for folder in (group, *group.parents) if folder.is_relative_to(mount))]
        limits.extend(limit for folder in folders if (limit := _limit(folder / file)) is not None)
    return limits


def _limit(path: Path) -> int | None:
    """A version 1 group without a limit says 2⁶³ less a page, a version 2 group says `max`."""
    text = _read(path).strip()
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
