"""Words of the kernel's files (/sys, /proc), and what they say of RDMA, memory and cores: the one view that preflight, the network check
and ranks have.

The kernel's list (sysfs) shows every device of the machine, also to a pod that was given two of them. libibverbs, and so NCCL, takes those
whose /dev/infiniband/uverbsN it finds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LOCKED_BYTES_FAILING = 64 << 20
"""Defaults of kernels (64 KiB, 8 MiB) and of a container runtime, known by ibv_reg_mr's ENOMEM. NCCL has 4 MiB of buffers a channel and
peer.
"""
LOCKED_BYTES_ENOUGH = 512 << 20
"""Lockable memory below which UCX 1.13 did without InfiniBand. Between the two it depends on ranks, channels and GPUDirect."""
UNLIMITED = 1 << 60


class RdmaPort(NamedTuple):
    """One port of a device, with the kernel's words for it."""

    device: str
    port: int
    state: str
    """ACTIVE, DOWN, INIT, ARMED; '' if it has none."""
    link_layer: str
    rate: str
    """Text such as "400 Gb/sec (4X NDR)"."""
    openable: bool
    folder: Path


def rdma_ports(root: Path = Path("/")) -> list[RdmaPort]:
    """Return all ports of all devices, by name."""
    devices, ports = root / "sys/class/infiniband", []
    for device in folder_names(devices):
        folder = devices / device
        nodes = folder_names(folder / "device/infiniband_verbs")
        openable = any((root / "dev/infiniband" / node).exists() for node in nodes)
        for name in folder_names(folder / "ports"):
            port = folder / "ports" / name
            state, link_layer, rate = (file_words(port / word) for word in ("state", "link_layer", "rate"))
            ports.append(RdmaPort(device, int(name) if name.isdecimal() else 0, state.partition(": ")[2], link_layer, rate, openable, port))
    return ports


def gigabits(rate: str) -> float | None:
    """Return the Gb/s of a port's rate; None where it has none."""
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", rate)
    return float(match[1]) if match else None


def folder_names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; none of one that isn't there."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def file_words(path: Path) -> str:
    """Return a file's text; '' of one that can't be read, such as an empty slot of a table (EINVAL)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


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


def usable_cores(root: Path = Path("/")) -> float:
    """Return the cores that this process may use at once: those of its affinity, and no more than any of its control groups allows."""
    groups = control_groups("cpu", root / "sys/fs/cgroup", root / "proc/self/cgroup")
    return min(len(os.sched_getaffinity(0)), *map(_core_limit, groups))


def _core_limit(group: Path) -> float:
    """Return the limit of a control group (version 2 or 1) in cores; infinity where there is none: no file, or one that says max or -1."""
    quota, period = (*file_words(group / "cpu.max").split(), "", "")[:2]
    if not quota:
        quota, period = (file_words(group / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else math.inf
