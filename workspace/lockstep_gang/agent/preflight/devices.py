"""GPUs, RDMA NICs and memory limits, as the kernel shows them. `root` is the file system to look at, another one in tests."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterable
from pathlib import Path

from lockstep_gang.contract.preflight import ExpectedRdma, GpuFacts, HcaFacts, RdmaFacts

ROOT = Path("/")
_CAP_IPC_LOCK = 14
_GPU_DEVICE = re.compile(r"nvidia\d+")
_DRIVER = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)\b")


def gpu_facts(root: Path = ROOT) -> GpuFacts:
    """The GPUs that this container has been given: /proc would show all of the machine."""
    count = sum(bool(_GPU_DEVICE.fullmatch(name)) for name in _names(root / "dev"))
    return GpuFacts(count, _driver(root))


def _driver(root: Path) -> str:
    text = _text(root / "proc/driver/nvidia/version")  # NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  …
    found = _DRIVER.search(text) if text else None
    return found[1] if found else _text(root / "sys/module/nvidia/version")


def shm_bytes(root: Path = ROOT) -> int:
    """Size of /dev/shm."""
    found = os.statvfs(root / "dev/shm")
    return found.f_blocks * found.f_frsize


def rdma_facts(expected: ExpectedRdma, root: Path = ROOT) -> RdmaFacts:
    folder = root / "sys/class/infiniband"
    devices = _names(folder)
    return RdmaFacts(
        hcas=tuple(hca for device in devices for hca in _ports(folder / device, expected.gid_index)),
        unusable=tuple(device for device in devices if not _can_be_opened(folder / device, root)),
        has_ipc_lock=_has_ipc_lock(root),
        memlock_bytes=_memlock_bytes(),
        mtus=_mtus(expected.interfaces, root),
    )


def _ports(device: Path, gid_index: int | None) -> Iterable[HcaFacts]:
    for name in _names(device / "ports"):
        port = device / "ports" / name
        gid = _text(port / f"gids/{gid_index}") if gid_index is not None else ""
        yield HcaFacts(
            device=device.name,
            port=int(name) if name.isdecimal() else 0,
            state=_text(port / "state").partition(": ")[2],
            link_layer=_text(port / "link_layer"),
            rate=_text(port / "rate"),
            gid="" if not gid.strip("0:") else gid,  # an empty slot is all zeroes
            gid_type=_text(port / f"gid_attrs/types/{gid_index}") if gid_index is not None else "",
        )


def _can_be_opened(device: Path, root: Path) -> bool:
    """libibverbs leaves out a device whose character device isn't in the container, whatever sysfs shows."""
    nodes = _names(device / "device/infiniband_verbs")
    return any((root / "dev/infiniband" / node).exists() for node in nodes)


def _has_ipc_lock(root: Path) -> bool:
    line = next((line for line in _text(root / "proc/self/status").splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _mtus(interfaces: Iterable[str], root: Path) -> dict[str, int]:
    """Of the interfaces that are there."""
    texts = {name: _text(root / "sys/class/net" / name / "mtu") for name in interfaces}
    return {name: int(text) for name, text in texts.items() if text.isdecimal()}


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):  # an empty slot of a table answers EINVAL
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
