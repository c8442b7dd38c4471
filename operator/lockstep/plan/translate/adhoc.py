"""A script on some hosts, as one types it for torchrun or mpirun, as a job file. Words in, text out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from posixpath import basename, isabs, normpath
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.files.yamltext import dump_yaml
from lockstep.api.hosts import HostsCluster
from lockstep.api.names import API_VERSION, JOB_NAME_MAX

PROCESSES = "--nproc-per-node"


def script_job(words: Sequence[str], hosts: HostsCluster, processes: int | None, cluster: str | None) -> str:
    """The job file of `words`, a Python file and its arguments, on all hosts.

    `processes`: ranks of each host; None: one for each GPU that the hosts state. `cluster`: name of their cluster file in clusters/, if they have one.

    Raises ConfigError for anything but a Python file, and for a number of ranks that isn't known or that the hosts don't have the GPUs for.
    """
    path = _script(words)
    place = "on the hosts" if isabs(path) else "below /workspace of the hosts"
    lines = [
        "# A script on hosts, as a job file. Every field there is: docs/reference/trainingjob.md",
        f"apiVersion: {API_VERSION}",
        "kind: TrainingJob",
        "metadata:",
        f"  name: {_job_name(path)}",
        "spec:",
        *([f"  cluster: {cluster}"] if cluster else []),
        f"  nodes: {len(hosts.hosts)}  # {', '.join(hosts.names)}",
        *_ranks(hosts, processes),
        f"  script:  # {place}",
        *_indented({"path": path}),
        *(_indented({"args": list(words[1:])}) if words[1:] else []),
        "  restart:",
        "    maxRestarts: 0  # as torchrun by default; a script that finds its own checkpoints may have more",
    ]
    return "\n".join(lines) + "\n"


def _indented(fields: dict[str, Any]) -> list[str]:
    return [f"    {line}" for line in dump_yaml(fields).splitlines()]


def _script(words: Sequence[str]) -> str:
    if not words:
        raise ConfigError("name what to run on the hosts: lockstep run --hosts 192.168.1.100,lab1 -- train.py --epochs 3")
    if not words[0].endswith(".py") or words[0].startswith("-"):
        raise ConfigError(
            f"{words[0]!r} is no Python file: a job on hosts runs one; write a module or another program into a file such as train.py"
        )
    path = normpath(words[0])
    if path.startswith("../"):
        raise ConfigError(f"{words[0]}: is outside /workspace of the hosts: name a file below it, or an absolute path on the hosts")
    return path


def _job_name(path: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", basename(path).removesuffix(".py").lower()).strip("-")
    return (words if re.match(r"[a-z]", words) else f"run-{words}".rstrip("-"))[:JOB_NAME_MAX].rstrip("-")


def _ranks(hosts: HostsCluster, processes: int | None) -> Iterator[str]:
    gpus = hosts.least_gpus
    if processes is None and not gpus:
        known = "have no GPU" if gpus == 0 else "state no GPUs"
        raise ConfigError(f"the hosts {known}: say how many ranks each has: {PROCESSES} 2")
    if gpus == 0:
        yield "  gpusPerNode: 0  # ranks run on CPUs, over gloo"
        yield f"  ranksPerNode: {processes}"
    elif gpus is None:
        yield f"  gpusPerNode: {processes}  # one rank for each GPU; for ranks on CPUs: gpusPerNode: 0 and ranksPerNode: {processes}"
    elif processes is not None and processes > gpus:
        raise ConfigError(f"{PROCESSES} is {processes}, and a host offers {gpus} GPUs: every GPU has one rank")
    else:
        counts = {len(host.gpus) if isinstance(host.gpus, list) else host.gpus for host in hosts.hosts}
        fewest = ", the fewest of any host" if processes is None and len(counts) > 1 else ""
        yield f"  gpusPerNode: {processes or gpus}  # one rank for each GPU{fewest}"
