"""Load of a host: CPUs, memory, disk, and each GPU with who uses it. Runs on hosts that ssh reaches, and here for `lockstep top --local`.

`python3 -c THIS '{"workspace": "~/lockstep/workspace", "datasets": …}'` answers every line on standard input with one line of JSON, and
ends with its input. It changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.platforms.inpod.rankload import (
    MIB,
    SMI_SECONDS,
    answer_questions,
    cores,
    gpus,
    machine_memory,
    machine_seconds,
    text_of,
)
from lockstep.platforms.inpod.rankprocesses import PROC, rank_processes, run_dir_of

CLAIM = "\0lockstep-gpu-"
"""Beginning of the abstract socket on which an agent that has claimed a GPU listens; its UUID follows."""
CLAIM_SECONDS, CLAIM_BYTES = 1.0, 500
PROCESSES_MAX = 64


def user_of(uid: int) -> str:
    """Name of a user; the number where nobody has that."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def disk(path: str) -> dict[str, Any]:
    """Space of the file system that a folder is on, or would be on once it is made. {} if the folder can't be looked at."""
    folder = Path(path).expanduser()
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        usage = shutil.disk_usage(folder)
    except OSError:
        return {}
    return {"path": path, "freeBytes": usage.free, "limitBytes": usage.total}


def computing() -> dict[str, list[dict[str, Any]]]:
    """Map of GPU's UUID to the processes that compute on it, as the driver has them."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False, errors="replace").stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    processes: dict[str, list[dict[str, Any]]] = {}
    for line in output.splitlines()[:PROCESSES_MAX]:
        uuid, pid, used = [cell.strip() for cell in line.split(",")] if line.count(",") == 2 else ("", "", "")
        if not pid.isdecimal():
            continue
        process = {"pid": int(pid), "name": text_of(PROC / pid / "comm").strip()}
        try:
            process["user"] = user_of((PROC / pid).stat().st_uid)
        except OSError:  # in a container, whose numbers are others
            process["user"] = ""
        processes.setdefault(uuid, []).append({**process, **({"bytes": int(used) * MIB} if used.isdecimal() else {})})
    return processes


def claim_of(uuid: str) -> dict[str, Any]:
    """Claim on a GPU: its own words, and the kernel's for whose it is. {}: there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(CLAIM_SECONDS)
        try:
            asking.connect(CLAIM + uuid)
            pid, uid, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        except OSError:
            return {}
        words = ""
        with contextlib.suppress(OSError):  # one that hangs has the GPU all the same
            words = asking.recv(CLAIM_BYTES).decode(errors="replace")
    return {"pid": pid, "user": user_of(uid), "words": words.strip()}


def jobs() -> list[dict[str, Any]]:
    """Jobs whose ranks run here, by the name of their run's folder; those of other users can't be seen."""
    ranks: dict[str, set[int]] = {}
    for _, environment in rank_processes():
        name = Path(run_dir_of(environment)).name
        if name:
            ranks.setdefault(name, set()).add(int(environment["RANK"]))
    return [{"name": name, "ranks": sorted(numbers)} for name, numbers in sorted(ranks.items())]


class HostWatch:
    """Repeated measurements of a host."""

    def __init__(self, workspace: str, datasets: str) -> None:
        self._folders = (workspace, datasets)
        self._before = (time.monotonic(), machine_seconds())

    def answer(self, **_: object) -> dict[str, Any]:
        """Measure now; CPUs are the mean since the last time."""
        now, used = time.monotonic(), machine_seconds()
        then, before = self._before
        self._before = (now, used)
        cpu: dict[str, float] = {"limitCores": float(cores())}
        if used is not None and before is not None:
            cpu["cores"] = max(0.0, used - before) / max(now - then, 1e-3)
        present, problem = gpus()
        processes = computing() if present else {}
        return {
            "cpu": cpu,
            "load": list(os.getloadavg()),
            "memory": machine_memory(),
            "disks": [found for folder in self._folders if (found := disk(folder))],
            "jobs": jobs(),
            "gpus": [{**gpu, "processes": processes.get(gpu["uuid"], []), "claim": claim_of(gpu["uuid"])} for gpu in present],
            **({"gpuProblem": problem} if problem else {}),
        }


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    answer_questions(HostWatch(request["workspace"], request["datasets"]).answer)
