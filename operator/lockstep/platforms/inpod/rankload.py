"""CPU, memory and GPUs of a node and of each rank on it: read from the kernel and by `nvidia-smi`, which in a pod shows the pod's own GPUs.

Nothing is imported but the standard library, since this is part of a program that runs in pods and on hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep_machine.cards import described_gpus
from lockstep_machine.gpus import gpu_devices, nvidia_smi
from lockstep_machine.limits import cores, memory_limit, usable_cores
from lockstep_machine.processes import leads_session, rank_processes, run_dir_of
from lockstep_machine.readings import PROC, byte_sizes, file_words, stat_fields

CGROUP = Path("/sys/fs/cgroup")
GPU_SECONDS = 5.0
"""Limit of nvidia-smi, within that of an answer."""
PATIENCE_SECONDS = 60.0
"""Seconds without a question after which a program ends: its connection may have broken silently."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
MIB = 1 << 20
GPU_FIELDS = {
    "memory.used": ("bytes", MIB), "memory.total": ("limitBytes", MIB), "utilization.gpu": ("percentage", 1),
    "temperature.gpu": ("celsius", 1), "power.draw": ("watts", 1), "power.limit": ("limitWatts", 1),
}  # fmt: skip
"""Numbers that nvidia-smi gives: their names in an answer, and what one of its units is there."""


def container_seconds(root: Path = CGROUP) -> float | None:
    """CPU seconds that the container has used; None where its cgroup doesn't say."""
    usage = re.search(r"^usage_usec (\d+)", file_words(root / "cpu.stat"), re.MULTILINE)
    if usage is not None:
        return int(usage[1]) / 1e6
    old = file_words(root / "cpuacct/cpuacct.usage")
    return int(old) / 1e9 if old.isdecimal() else None


def container_memory(root: Path = CGROUP) -> dict[str, int]:
    """Memory of the container in bytes, and its limit where there is one."""
    for group, name in ((root, "memory.current"), (root / "memory", "memory.usage_in_bytes")):
        used, limit = file_words(group / name), memory_limit(group)
        if used.isdecimal():
            return {"bytes": int(used), **({} if limit is None else {"limitBytes": limit})}
    return {}


def machine_seconds(proc: Path = PROC) -> float | None:
    """CPU seconds that all processes of the machine have used; None where the kernel doesn't say."""
    fields = file_words(proc / "stat").partition("\n")[0].split()[1:9]  # user nice system idle iowait irq softirq steal
    if len(fields) < 5 or not all(field.isdecimal() for field in fields):
        return None
    return (sum(map(int, fields)) - int(fields[3]) - int(fields[4])) / os.sysconf("SC_CLK_TCK")


def machine_memory(proc: Path = PROC) -> dict[str, int]:
    """Memory of the machine in bytes that isn't available to a new process, and all of it."""
    sizes = byte_sizes(proc / "meminfo")
    if not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return {}
    return {"bytes": sizes["MemTotal"] - sizes["MemAvailable"], "limitBytes": sizes["MemTotal"]}


def gpus(root: Path = Path("/")) -> tuple[list[dict[str, Any]], str]:
    """Each GPU by the driver's own tool, and why some or all are missing, or ''. What the driver doesn't know of a GPU is left out of
    it.
    """
    devices = gpu_devices(root)
    if not nvidia_smi():
        if devices:
            return [], "its GPUs are not shown: nvidia-smi is not on the PATH"
        return [], "its AMD GPUs are not shown: only nvidia-smi is read" if (root / "dev/kfd").exists() else ""
    rows, problem = described_gpus(("index", "uuid", "name"), tuple(GPU_FIELDS), GPU_SECONDS)
    described = [gpu_in(row) for row in rows if row["index"].isdecimal()]
    return described, f"{'not all of its GPUs are' if described else 'its GPUs are not'} shown: {problem}" if problem and (
        devices or described
    ) else ""


def gpu_in(row: Mapping[str, str]) -> dict[str, Any]:
    """GPU in a row of nvidia-smi's table."""
    gpu: dict[str, Any] = {"index": int(row["index"]), "uuid": row["uuid"], "name": row["name"]}
    for field, (name, unit) in GPU_FIELDS.items():
        with contextlib.suppress(KeyError, ValueError, OverflowError):  # [N/A], such as the load of a GPU in parts
            gpu[name] = round(float(row[field]) * unit)
    return gpu


def gpu_of(environment: Mapping[str, str], present: list[dict[str, Any]]) -> int | None:
    """Index of the GPU that a rank uses: that of its LOCAL_RANK, of those that it sees. None: it uses none, or nobody can tell.

    CUDA puts unlike GPUs in an order of its own unless CUDA_DEVICE_ORDER says otherwise, and that order isn't known here.
    """
    local = environment.get("LOCAL_RANK", "")
    visible = (
        [name.strip() for name in environment[VISIBLE].split(",")] if VISIBLE in environment else [str(gpu["index"]) for gpu in present]
    )
    if not local.isdecimal() or int(local) >= len(visible):
        return None
    name = visible[int(local)]
    if not name.isdecimal():
        return next((gpu["index"] for gpu in present if name.startswith("GPU-") and gpu["uuid"].startswith(name)), None)
    alike = len({gpu["name"] for gpu in present}) < 2 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return next((gpu["index"] for gpu in present if alike and gpu["index"] == int(name)), None)


class Load:
    """Repeated measurements of a node and its ranks.

    `run_dir`: only of the ranks of this run, on a machine that is shared, of which all CPUs and all memory are the node's; '' in a pod.
    """

    def __init__(self, run_dir: str = "", proc: Path = PROC) -> None:
        self._run_dir, self._proc = run_dir, proc
        self._time = time.monotonic()
        self._seconds = self._node_seconds()
        self._used = {process: seconds for one in self._processes().values() for process, seconds in one["seconds"].items()}

    def answer(self) -> dict[str, Any]:
        """Measure now; CPUs are the mean since the last time."""
        now, used = time.monotonic(), self._node_seconds()
        elapsed = max(now - self._time, 1e-3)
        processes = self._processes()
        present, problem = gpus()
        cpu: dict[str, float] = {"limitCores": float(cores() if self._run_dir else usable_cores())}
        if used is not None and self._seconds is not None:
            cpu["cores"] = max(0.0, used - self._seconds) / elapsed
        rows = [
            {
                "rank": rank,
                "cores": round(
                    sum(max(0.0, seconds - self._used.get(process, 0.0)) for process, seconds in one["seconds"].items()) / elapsed, 3
                ),
                "bytes": one["bytes"],
                **({} if (index := gpu_of(one["environment"], present)) is None else {"gpu": index}),
            }
            for rank, one in sorted(processes.items())
        ]
        self._time, self._seconds = now, used
        self._used = {process: seconds for one in processes.values() for process, seconds in one["seconds"].items()}
        return {
            "cpu": cpu,
            "memory": machine_memory(self._proc) if self._run_dir else container_memory(),
            "ranks": sorted(processes),
            "rankLoads": rows,
            "gpus": present,
            **({"gpuProblem": problem} if problem else {}),
        }

    def _node_seconds(self) -> float | None:
        return machine_seconds(self._proc) if self._run_dir else container_seconds()

    def _processes(self) -> dict[int, dict[str, Any]]:
        """Map of rank to the CPU seconds of each of its processes, their memory, and the variables of the one that its agent started."""
        ranks: dict[int, dict[str, Any]] = {}
        for folder, environment in rank_processes(self._proc):
            if self._run_dir and run_dir_of(environment) != self._run_dir:
                continue
            try:
                fields = stat_fields(folder)
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                leads = leads_session(folder)
            except (OSError, IndexError, ValueError):
                continue  # it ended meanwhile
            rank = ranks.setdefault(int(environment["RANK"]), {"seconds": {}, "bytes": 0, "environment": environment})
            rank["seconds"][(folder.name, fields[19])] = seconds  # (with its start: numbers are given again)
            rank["bytes"] += own_memory(folder)
            if leads:
                rank["environment"] = environment
        return ranks


def own_memory(process: Path) -> int:
    """Bytes of memory that a process holds itself, without files that it maps."""
    sizes = byte_sizes(process / "status")
    return sum(sizes.get(name, 0) for name in ("RssAnon", "RssShmem"))


def answer_questions(answer: Callable[..., dict[str, Any]]) -> None:
    """Answer every line on standard input, an object of arguments, with one line, until it ends or nobody has asked for long."""
    while select.select([sys.stdin], [], [], PATIENCE_SECONDS)[0] and (line := sys.stdin.readline()):
        print(json.dumps(answer(**json.loads(line))), flush=True)
