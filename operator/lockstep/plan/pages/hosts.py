"""Hosts of a cluster without a job: load, memory, disk, jobs, and each GPU with who uses it, for `lockstep top` (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.api.objects import Object
from lockstep.plan.pages.answers import GPUS_MAX, RANKS_MAX, amounts, counts, is_count, items, mapping, read_gpu, word
from lockstep.plan.pages.load import NONE, cpu_cell, fitted, gpu_cells, memory_cell, problem_lines
from lockstep_spec.words import binary_size, listed

COLUMNS = ("HOST", "LOAD", "CPU", "MEMORY", "FREE DISK", "JOBS")
DROPS = (("LOAD",), ("FREE DISK",), ("MEMORY",))
GPU_COLUMNS = ("HOST", "GPU", "NAME", "LOAD", "GPU MEMORY", "TEMP", "POWER", "USED BY")
GPU_DROPS = (("POWER",), ("TEMP",), ("NAME",), ("GPU MEMORY",))
LOADS, DISKS_MAX, JOBS_MAX, PROCESSES_MAX = 3, 8, 64, 64


def read_host(answer: Mapping[str, Any]) -> Object:
    """`hostload.HostWatch.answer`, without what is none of it: whoever owns a host decides what its Python prints."""
    load = [amount["load"] for value in items(answer.get("load"), LOADS) if (amount := amounts({"load": value}, ("load",)))]
    facts: Object = {
        "cpu": amounts(answer.get("cpu"), ("cores", "limitCores")),
        "load": load if len(load) == LOADS else [],
        "memory": counts(answer.get("memory"), ("bytes", "limitBytes")),
        "disks": [disk for disk in map(_disk, items(answer.get("disks"), DISKS_MAX)) if len(disk) == len(_DISK)],
        "jobs": [job for job in map(_job, items(answer.get("jobs"), JOBS_MAX)) if job["name"]],
        "gpus": [gpu for gpu in map(_gpu, items(answer.get("gpus"), GPUS_MAX)) if "index" in gpu],
        "gpuProblem": word(answer.get("gpuProblem")),
    }
    return {key: value for key, value in facts.items() if value}


_DISK = ("path", "freeBytes", "limitBytes")


def _disk(value: object) -> Object:
    path = word(mapping(value).get("path"))
    return {**({"path": path} if path else {}), **counts(value, _DISK[1:])}


def _job(value: object) -> Object:
    return {
        "name": word(mapping(value).get("name")),
        "ranks": [rank for rank in items(mapping(value).get("ranks"), RANKS_MAX) if is_count(rank)],
    }


def _gpu(value: object) -> Object:
    gpu = mapping(value)
    claim = _owner(gpu.get("claim"), "words")
    processes = [process for process in (_owner(item, "name") for item in items(gpu.get("processes"), PROCESSES_MAX)) if "pid" in process]
    return {**read_gpu(value), **({"claim": claim} if "pid" in claim else {}), **({"processes": processes} if processes else {})}


def _owner(value: object, text: str) -> Object:
    words = {name: text_ for name in ("user", text) if (text_ := word(mapping(value).get(name)))}
    return {**counts(value, ("pid", "bytes")), **words}


def hosts_view(cluster: str, answers: Mapping[str, Object]) -> Object:
    """Snapshot of a cluster's hosts. `answers`: by name, in the order of its file, what `read_host` read or `{"problem": …}`."""
    return {"cluster": cluster, "hosts": [{"host": name, **answer} for name, answer in answers.items()]}


def hosts_page(view: Object, width: int | None) -> Iterator[str]:
    """The snapshot for a person. `width`: of the terminal, in characters; None: no limit."""
    hosts = view["hosts"]
    yield from fitted(COLUMNS, list(map(_host_row, hosts)), DROPS, width)
    if gpus := [_gpu_row(host, gpu) for host in hosts for gpu in host.get("gpus", [])]:
        yield ""
        yield from fitted(GPU_COLUMNS, gpus, GPU_DROPS, width)
    yield from problem_lines(hosts)


def _host_row(host: Object) -> tuple[str, ...]:
    disk = next(iter(host.get("disks", [])), None)  # the workspace's
    return (
        host["host"],
        f"{host['load'][0]:.1f}" if "load" in host else NONE,
        cpu_cell(host.get("cpu", {})),
        memory_cell(host.get("memory", {})),
        NONE if disk is None else f"{binary_size(disk['freeBytes'])} of {binary_size(disk['limitBytes'])}",
        listed([f"{job['name']} ({_ranks(job['ranks'])})" for job in host.get("jobs", [])]) or NONE,
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"


def _gpu_row(host: Object, gpu: Object) -> tuple[str, ...]:
    index, *cells = gpu_cells(gpu)
    return (host["host"], index, gpu.get("name", NONE), *cells, _used_by(gpu))


def _used_by(gpu: Object) -> str:
    """The claim, then the processes of others: whoever computes on a GPU without a claim is in the way all the same."""
    claim = gpu.get("claim", {})
    holder = f"claimed by {claim.get('user') or 'somebody'}"
    parts = [f"{claim['words']} ({holder})" if "words" in claim else f"{holder} (pid {claim['pid']})"] if claim else []
    strangers = [process for process in gpu.get("processes", []) if not claim or process.get("user") != claim.get("user")]
    parts += [f"{process.get('user') or 'somebody'}: {process.get('name') or 'a process'} (pid {process['pid']})" for process in strangers]
    return listed(parts) or "free"
