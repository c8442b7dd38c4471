"""`agent.pyz probe`: what one node looks like from inside of a pod, as a line of JSON. For `lockstep cluster discover --probe`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep_gang.agent.preflight import devices
from lockstep_gang.contract.preflight import ExpectedRdma
from lockstep_gang.contract.sweep import PROBED


def main(root: Path = devices.ROOT) -> int:
    print(PROBED + json.dumps(probed(root)), flush=True)
    return 0


def probed(root: Path) -> dict[str, Any]:
    """GPUs of the whole machine: the pod itself has none, so that it never waits for one. HCAs as sysfs shows them, which may be more than a pod gets."""
    interfaces = names(root / "sys/class/net")
    facts = devices.rdma_facts(ExpectedRdma(interfaces=tuple(interfaces)), root)
    status = text(root / "proc/self/status").splitlines()
    return {
        "gpus": len(names(root / "proc/driver/nvidia/gpus")),
        "driver": devices.gpu_facts(root).driver,
        "hcas": {hca.device: f"{hca.state} {hca.link_layer} {hca.rate}".strip() for hca in facts.hcas},
        "interfaces": {name: mtu for name, mtu in facts.mtus.items() if name != "lo"},
        "memlock_bytes": facts.memlock_bytes,
        "capabilities": next((line.split()[1] for line in status if line.startswith("CapEff:")), ""),
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
