"""NVIDIA's cards: as nvidia-smi describes them, who computes on each, and those on the PCI bus, whether a driver has them or not. Python
3.6 reads it, too.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from lockstep_machine.gpus import SMI_WORDS_MAX, gpu_devices, smi_rows
from lockstep_machine.readings import PROC, file_words, user_name

GPUS_MAX, USERS_MAX = 64, 64
_UNKNOWN_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field')


def described_gpus(needed: Any, more: Any, seconds: float) -> Any:
    """Return each GPU as field → nvidia-smi's word, and why not all are known; ''. Of `more`, an older driver's unknown fields are left
    out.
    """
    asked = [*needed, *more]
    while True:
        rows, problem = smi_rows("--query-gpu=" + ",".join(asked), seconds)
        unknown = _UNKNOWN_FIELD.search(problem)
        if unknown is None or unknown.group(1) not in asked[len(needed) :]:
            break
        asked.remove(unknown.group(1))
    odd = [row for row in rows if len(row) != len(asked)]
    if odd and not problem:
        problem = f"nvidia-smi says of a GPU: {', '.join(odd[0])[:SMI_WORDS_MAX]}"
    return [dict(zip(asked, row)) for row in rows if len(row) == len(asked)][:GPUS_MAX], problem  # noqa: B905 (Python 3.6 has no strict)


def gpu_users(seconds: float) -> Any:
    """Return GPU's UUID → the processes that compute on it, as the driver has them, and why that isn't known; ''."""
    rows, problem = smi_rows("--query-compute-apps=gpu_uuid,pid,used_memory", seconds)
    users: Any = {}
    for row in [row for row in rows if len(row) == 3 and row[1].isdecimal()][:USERS_MAX]:
        folder = PROC / row[1]
        process = {"pid": int(row[1]), "name": file_words(folder / "comm"), "user": ""}
        with contextlib.suppress(OSError):  # in a container, whose numbers are others
            process["user"] = user_name(folder.stat().st_uid)
        if row[2].isdecimal():
            process["bytes"] = int(row[2]) << 20
        users.setdefault(row[0], []).append(process)
    return users, problem


def nvidia_cards(root: Path = Path("/")) -> Any:
    """Return address → driver of NVIDIA's graphics cards on the PCI bus ('': none has it), without those that are given to virtual
    machines.
    """
    cards = {}
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        if file_words(vendor) == "0x10de" and file_words(vendor.with_name("class")).startswith(("0x0300", "0x0302")):
            driver = vendor.with_name("driver")
            cards[vendor.parent.name] = driver.resolve().name if driver.is_symlink() else ""
    return {address: driver for address, driver in cards.items() if driver != "vfio-pci"}


def lost_gpus(listed: Any, root: Path = Path("/")) -> str:
    """Return words about GPUs that NVIDIA's driver has on the PCI bus and nvidia-smi doesn't list by their addresses; '' if none is lost.

    A container that was given fewer GPUs than the bus shows has fewer devices /dev/nvidiaN, too: then nothing can be said.
    """
    held = [address for address, driver in nvidia_cards(root).items() if driver == "nvidia"]
    lost = [address for address in held if address not in [bus.lower()[-len(address) :] for bus in listed]]
    if not lost or gpu_devices(root) < len(held):
        return ""
    return "{} on the PCI bus is not in nvidia-smi's list: the driver has lost the GPU".format(", ".join(lost))
