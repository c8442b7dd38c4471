"""Load of a host: CPUs, memory, disk, and each GPU with who uses it. Runs on hosts that ssh reaches, and here for `lockstep top --local`.

`python3 -c THIS '{"workspace": "~/lockstep/workspace", "datasets": …}'` answers every line on standard input with one line of JSON, and
ends with its input. It changes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.platforms.inpod.rankload import GPU_SECONDS, answer_questions, gpus, machine_memory, machine_seconds
from lockstep_machine.cards import gpu_users
from lockstep_machine.gpus import gpu_claim
from lockstep_machine.limits import cores
from lockstep_machine.processes import rank_processes, run_dir_of
from lockstep_machine.readings import nearest


def disk(path: str) -> dict[str, Any]:
    """Space of the file system that a folder is on, or would be on once it is made. {} if the folder can't be looked at."""
    try:
        usage = shutil.disk_usage(nearest(Path(path).expanduser()))
    except OSError:
        return {}
    return {"path": path, "freeBytes": usage.free, "limitBytes": usage.total}


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
        processes, _ = gpu_users(GPU_SECONDS) if present else ({}, "")
        return {
            "cpu": cpu,
            "load": list(os.getloadavg()),
            "memory": machine_memory(),
            "disks": [found for folder in self._folders if (found := disk(folder))],
            "jobs": jobs(),
            "gpus": [{**gpu, "processes": processes.get(gpu["uuid"], []), "claim": gpu_claim(gpu["uuid"]) or {}} for gpu in present],
            **({"gpuProblem": problem} if problem else {}),
        }


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    answer_questions(HostWatch(request["workspace"], request["datasets"]).answer)
