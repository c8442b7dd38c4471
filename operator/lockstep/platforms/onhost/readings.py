"""Readings of a host that several programs there take: files, the user, libraries and cards, output of commands, and the process that keeps
an agent; and the lock of starts.

Python 3.6 reads it, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMAND_SECONDS = 5.0


def state_folder() -> Path:
    """Return the folder with one folder for each job."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "lockstep" / "jobs"


def text_of(path: Any) -> str:
    """Return the text of a file; '' if it can't be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def output(*command: str, seconds: float = COMMAND_SECONDS) -> str:
    """Return the output of a command; '' when it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds, check=False,
            errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def user_name() -> str:
    """Return the login name of the user; their number if they have none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def lingers() -> bool:
    """Return True if this user's units go on without a login."""
    linger = output("loginctl", "show-user", user_name(), "--property=Linger", "--value").strip()
    return {"yes": True, "no": False}.get(linger, Path("/var/lib/systemd/linger", user_name()).exists())


def glibc() -> str:
    """Return the version of the C library; '' where it is another one."""
    with contextlib.suppress(OSError, AttributeError):
        version = ctypes.CDLL(None).gnu_get_libc_version
        version.restype = ctypes.c_char_p
        return str(version().decode())
    return ""


def nvidia_cards(root: Path = Path("/")) -> Any:
    """Return address → driver of NVIDIA's graphics cards on the PCI bus ('': none has it), without those that are given to virtual
    machines.
    """
    cards = {}
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        if text_of(vendor).strip() == "0x10de" and text_of(vendor.with_name("class")).startswith(("0x0300", "0x0302")):
            driver = vendor.with_name("driver")
            cards[vendor.parent.name] = driver.resolve().name if driver.is_symlink() else ""
    return {address: driver for address, driver in cards.items() if driver != "vfio-pci"}


def lost_gpus(listed: Any, root: Path = Path("/")) -> str:
    """Return words about GPUs that NVIDIA's driver has on the PCI bus and nvidia-smi doesn't list by their addresses; '' if none is lost.

    A container that was given fewer GPUs than the bus shows has fewer devices /dev/nvidiaN, too: then nothing can be said.
    """
    held = [address for address, driver in nvidia_cards(root).items() if driver == "nvidia"]
    lost = [address for address in held if address not in [bus.lower()[-len(address) :] for bus in listed]]
    if not lost or len(list(root.glob("dev/nvidia[0-9]*"))) < len(held):
        return ""
    return "{} on the PCI bus is not in nvidia-smi's list: the driver has lost the GPU".format(", ".join(lost))


def nvidia_smi() -> str:
    """Return the path of nvidia-smi; '' where there is none. In WSL it is where no login shell looks."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib") or ""


def start_ticks(pid: int) -> int | None:
    """Return the kernel's start time of a process, which no later process of the same number has; None: it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(rest[18])


def supervisor(name: str) -> int | None:
    """Return the pid of the process that keeps a job's agent where no systemd does, if it is the very one that was started."""
    record = object_in(state_folder() / name / "supervisor.json")
    try:
        pid, ticks = int(record["pid"]), int(record["startTicks"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return pid if start_ticks(pid) == ticks else None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Do the block while no other start does its own."""
    state_folder().mkdir(parents=True, exist_ok=True)
    with state_folder().with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # (the agent's supervisor has the descriptor, too)
