"""RDMA devices of this machine, by the one view of the kernel's files that preflight, the network check and ranks have.

The kernel's list (sysfs) shows every device of the machine, also to a pod that was given two of them. libibverbs, and so NCCL, takes those
whose /dev/infiniband/uverbsN it finds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from lockstep_machine.readings import file_words, folder_names

LOCKED_BYTES_FAILING = 64 << 20
"""Defaults of kernels (64 KiB, 8 MiB) and of a container runtime, known by ibv_reg_mr's ENOMEM. NCCL has 4 MiB of buffers a channel and
peer.
"""
LOCKED_BYTES_ENOUGH = 512 << 20
"""Lockable memory below which UCX 1.13 did without InfiniBand. Between the two it depends on ranks, channels and GPUDirect."""


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
