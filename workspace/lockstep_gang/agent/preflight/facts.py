"""Facts about this node: GPUs, RDMA NICs and memory limits as the kernel shows them, installed versions, and variables.

`root` is the file system to look at, another one in tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep_gang.contract.preflight import PROBED, ExpectedRdma, GpuFacts, HcaFacts, RdmaFacts

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
    match = _DRIVER.search(text) if text else None
    return match[1] if match else _text(root / "sys/module/nvidia/version")


def shm_bytes(root: Path = ROOT) -> int:
    """Size of /dev/shm."""
    usage = os.statvfs(root / "dev/shm")
    return usage.f_blocks * usage.f_frsize


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
    """Return True if the device's character device is in the container. libibverbs leaves it out otherwise, whatever sysfs shows."""
    nodes = _names(device / "device/infiniband_verbs")
    return any((root / "dev/infiniband" / node).exists() for node in nodes)


def _has_ipc_lock(root: Path) -> bool:
    line = next((line for line in _text(root / "proc/self/status").splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _mtus(interfaces: Iterable[str], root: Path) -> dict[str, int]:
    """MTU of each of the interfaces that exist."""
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


LIBRARIES = (
    "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "deepspeed", "transformers", "peft", "accelerate", "safetensors", "numpy",
    "bitsandbytes",
)  # fmt: skip
PYTHON = "python"
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "PYTORCH_CUDA_", "PYTORCH_ALLOC_")
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
_VALUE_CHARACTERS = 300


def versions() -> dict[str, str]:
    """Versions of Python and of every installed library, which ranks of all nodes must have alike. Nothing is imported to find one."""
    import importlib.metadata  # 40 ms that an agent's start need not wait for

    installed = {PYTHON: platform.python_version()}
    for name in LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def compared_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how ranks talk and compute. Named one by one or by prefix, so that no secret is ever among them."""
    return {name: value[:_VALUE_CHARACTERS] for name, value in sorted(variables.items()) if name in _NAMES or name.startswith(_PREFIXES)}


def probe(root: Path = ROOT) -> int:
    """Print a line of JSON: this node as a pod sees it (`agent.pyz probe`), for `lockstep cluster discover --probe`."""
    print(PROBED + json.dumps(probed(root)), flush=True)
    return 0


def probed(root: Path) -> dict[str, Any]:
    """Facts about one node: GPUs of the whole machine, since the pod has none so that it never waits for one, and HCAs as sysfs shows them, which may be
    more than a pod gets."""
    interfaces = _names(root / "sys/class/net")
    facts = rdma_facts(ExpectedRdma(interfaces=tuple(interfaces)), root)
    status = _text(root / "proc/self/status").splitlines()
    return {
        "gpus": len(_names(root / "proc/driver/nvidia/gpus")),
        "driver": gpu_facts(root).driver,
        "hcas": {hca.device: f"{hca.state} {hca.link_layer} {hca.rate}".strip() for hca in facts.hcas},
        "interfaces": {name: mtu for name, mtu in facts.mtus.items() if name != "lo"},
        "memlock_bytes": facts.memlock_bytes,
        "capabilities": next((line.split()[1] for line in status if line.startswith("CapEff:")), ""),
    }
