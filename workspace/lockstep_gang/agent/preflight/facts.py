"""Facts about this node: GPUs, RDMA NICs and memory limits as the kernel shows them, installed versions, and variables.

`root` is the file system to look at, another one in tests.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep_gang.contract.preflight import PROBED, ExpectedRdma, GpuFacts, HcaFacts, RdmaFacts, is_link_local
from lockstep_machine.gpus import SMI_SECONDS, gpu_devices, smi_rows
from lockstep_machine.rdma import RdmaPort, rdma_ports
from lockstep_machine.readings import file_words, folder_names

ROOT = Path("/")
_CAP_IPC_LOCK = 14
_DRIVER = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)\b")


def gpu_facts(root: Path = ROOT) -> GpuFacts:
    """The GPUs that this container has been given: /proc would show all of the machine. In WSL nvidia-smi alone knows them."""
    if (root / "dev/dxg").exists():
        rows, problem = smi_rows("--query-gpu=driver_version", SMI_SECONDS, root)
        if not problem:
            return GpuFacts(len(rows), rows[0][0] if rows else "")
    return GpuFacts(gpu_devices(root), _driver(root))


def _driver(root: Path) -> str:
    text = file_words(root / "proc/driver/nvidia/version")  # NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  …
    match = _DRIVER.search(text) if text else None
    return match[1] if match else file_words(root / "sys/module/nvidia/version")


def shm_bytes(root: Path = ROOT) -> int:
    """Size of /dev/shm."""
    usage = os.statvfs(root / "dev/shm")
    return usage.f_blocks * usage.f_frsize


def rdma_facts(expected: ExpectedRdma, root: Path = ROOT) -> RdmaFacts:
    ports = rdma_ports(root)
    return RdmaFacts(
        hcas=tuple(_hca(port, expected.gid_index) for port in ports),
        unusable=tuple(dict.fromkeys(port.device for port in ports if not port.openable)),
        has_ipc_lock=bool(int(_capabilities(root) or "0", 16) >> _CAP_IPC_LOCK & 1),
        memlock_bytes=_memlock_bytes(),
        mtus=_mtus(expected.interfaces, root),
    )


def _hca(port: RdmaPort, gid_index: int | None) -> HcaFacts:
    gid = file_words(port.folder / f"gids/{gid_index}") if gid_index is not None else ""
    return HcaFacts(
        device=port.device,
        port=port.port,
        state=port.state,
        link_layer=port.link_layer,
        rate=port.rate,
        gid=gid if gid.strip("0:") else "",  # an empty slot is all zeroes
        gid_type=file_words(port.folder / f"gid_attrs/types/{gid_index}") if gid_index is not None else "",
        routed_gids=_routed(port.folder) if port.link_layer == "Ethernet" else None,
        no_guid=file_words(port.folder.parents[1] / "node_guid") == "0000:0000:0000:0000",
    )


def _routed(port: Path) -> tuple[int, ...] | None:
    """Entries of the table whose address isn't link-local, RoCE v2 first; None: the table is empty."""
    entries = sorted(int(name) for name in folder_names(port / "gids") if name.isdecimal())
    gids = {entry: gid for entry in entries if (gid := file_words(port / f"gids/{entry}")).strip("0:")}
    routed = [entry for entry, gid in gids.items() if not is_link_local(gid)]
    return None if not gids else tuple(sorted(routed, key=lambda entry: file_words(port / f"gid_attrs/types/{entry}") != "RoCE v2"))


def _capabilities(root: Path) -> str:
    """Effective capabilities of this process, in hexadecimal digits; empty where there is no /proc."""
    return next((line.split()[1] for line in file_words(root / "proc/self/status").splitlines() if line.startswith("CapEff:")), "")


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _mtus(interfaces: Iterable[str], root: Path) -> dict[str, int]:
    """MTU of each of the interfaces that exist."""
    texts = {name: file_words(root / "sys/class/net" / name / "mtu") for name in interfaces}
    return {name: int(text) for name, text in texts.items() if text.isdecimal()}


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
    """Facts about one node: GPUs of the whole machine, since the pod has none so that it never waits for one, and HCAs as sysfs shows them,
    which may be more than a pod gets.
    """
    interfaces = folder_names(root / "sys/class/net")
    facts = rdma_facts(ExpectedRdma(interfaces=tuple(interfaces)), root)
    return {
        "gpus": len(folder_names(root / "proc/driver/nvidia/gpus")),
        "driver": gpu_facts(root).driver,
        "hcas": {hca.device: f"{hca.state} {hca.link_layer} {hca.rate}".strip() for hca in facts.hcas},
        "interfaces": {name: mtu for name, mtu in facts.mtus.items() if name != "lo"},
        "memlockBytes": facts.memlock_bytes,
        "capabilities": _capabilities(root),
    }


def has_net_plugin(variables: Mapping[str, str], root: Path = ROOT) -> bool:
    """Return True if the linker finds a network plugin of NCCL, as aws-ofi-nccl is one, in its cache or the folders that it looks into."""
    folders = [*variables.get("LD_LIBRARY_PATH", "").split(":"), "/lib", "/usr/lib", "/usr/lib64"]
    cache = root / "etc/ld.so.cache"
    if cache.is_file() and b"libnccl-net" in cache.read_bytes():
        return True
    return any(True for folder in filter(None, folders) for _ in (root / folder.lstrip("/")).glob("libnccl-net*.so*"))
