"""GPUs of this machine: their devices, what nvidia-smi says, and which job has claimed one. Python 3.6 reads it, too."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

from lockstep_machine.readings import folder_names, user_name

SMI_SECONDS = 10.0
"""Limit of nvidia-smi: without its persistence mode, the driver looks at each GPU anew."""
SMI_WORDS_MAX = 300
_NO_DEVICES = "No devices were found"
CLAIM = "\0lockstep-gpu-"
"""Beginning of the abstract socket on which an agent that has claimed a GPU listens; its UUID follows."""
CLAIM_SECONDS, CLAIM_BYTES, CLAIM_PAUSE = 1.0, 256, 0.05


def gpu_devices(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA's GPUs that may be opened here."""
    return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in folder_names(root / "dev"))


def nvidia_smi(root: Path = Path("/")) -> str:
    """Return the path of nvidia-smi; '' where there is none. In WSL it is where no login shell looks."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=str(root / "usr/lib/wsl/lib")) or ""


def smi_rows(query: str, seconds: float, root: Path = Path("/")) -> Any:
    """Return the rows of cells that nvidia-smi prints for a query, and why it failed; neither where there is none, or it finds no GPU."""
    command = [nvidia_smi(root), query, "--format=csv,noheader,nounits"]
    try:
        done = command[0] and subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return [], "nvidia-smi gives no answer in {:.0f} s".format(seconds)  # noqa: UP032
    except OSError as error:
        return [], "nvidia-smi can't be run: {}".format(error.strerror)  # noqa: UP032
    if not done or (done.returncode and _NO_DEVICES in done.stdout):
        return [], ""
    lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("WARNING:")]  # (of GPUs that work)
    words = " ".join(done.stdout.split())[:SMI_WORDS_MAX] or "it says nothing"
    problem = f"nvidia-smi ends with {done.returncode}: {words}" if done.returncode else ""
    return [[cell.strip() for cell in line.split(",")] for line in lines], problem


def gpu_claim(uuid: str, seconds: float = CLAIM_SECONDS) -> Any:
    """Return the claim on a GPU: its holder's words ('': it doesn't answer), and the kernel's for whose it is; None: there is none.

    One that is stopped or asked by many holds the GPU all the same.
    """
    deadline = time.monotonic() + seconds
    claim: Any = {"pid": 0, "user": "unknown"}
    line = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(seconds)
        while not claim["pid"]:
            try:
                asking.connect(CLAIM + uuid)
                pid, uid, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
                claim = {"pid": pid, "user": user_name(uid)}
            except ConnectionRefusedError:
                return None
            except OSError as error:  # so many ask that there is no room
                if error.errno != errno.EAGAIN or time.monotonic() >= deadline:
                    break
                time.sleep(CLAIM_PAUSE)
        with contextlib.suppress(OSError):
            while claim["pid"] and len(line) < CLAIM_BYTES and b"\n" not in line:
                asking.settimeout(max(deadline - time.monotonic(), 0.001))
                data = asking.recv(CLAIM_BYTES)
                if not data:
                    break
                line += data
    return {"words": line.partition(b"\n")[0][:CLAIM_BYTES].decode(errors="replace").strip(), **claim}
