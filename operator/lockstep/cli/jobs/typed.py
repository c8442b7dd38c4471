"""A program that is typed behind `--`, as a job: on hosts, to which its folder is sent, or on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError
from lockstep.api.files.jobfile import parse_job_file
from lockstep.cli.shared.clusterfiles import LOCAL_CLUSTER, cluster_of_hosts, load_cluster, load_hosts
from lockstep.cli.shared.inputs import Inputs
from lockstep.plan.translate.adhoc import PROCESSES, TypedProgram, script_job
from lockstep.platforms.files.sync import own_folders
from lockstep.platforms.hosts.backend import HostsBackend
from lockstep.platforms.hosts.sync import send_project
from lockstep.platforms.jobs.machine import gpus_here
from lockstep.platforms.places.backend import HostOptions
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob


def _fields(changes: Sequence[str]) -> list[str]:
    """Return changes by their fields of the spec."""
    return [change.removeprefix("spec.") for change in changes]


def _read(
    typed: TypedProgram, changes: Sequence[str], source: str, nodes: Mapping[str, int | None], processes: int | None, cluster: str | None,
    folder: str | None,
) -> TrainingJob:  # fmt: skip
    """Return the job of a typed program: `changes` (--set) apply to its file. Others: as of `script_job`. Raises ConfigError."""
    of_ranks = [change for change in _fields(changes) if change.startswith(("ranksPerNode=", "gpusPerNode="))]
    other = next((change for change in of_ranks if change.startswith("ranksPerNode=") and change != f"ranksPerNode={processes}"), None)
    if processes is not None and other is not None:
        raise ConfigError(f"{PROCESSES} {processes} and --set {other} both say how many ranks a node has: use one of them")
    if "gpusPerNode=0" in of_ranks:
        nodes = dict.fromkeys(nodes, 0)
    text = script_job(typed, nodes, processes, cluster, folder, ranks_stated=bool(of_ranks))
    return parse_job_file(text, source, changes)


def typed_on_hosts(
    hosts: str, words: Sequence[str], processes: int | None, changes: Sequence[str], options: HostOptions
) -> tuple[Inputs, str]:
    """Return the job, and its cluster as it is named. If the program is in this folder, it is sent to a folder of its own, where ranks will
    work. Raises ConfigError, Failed.
    """
    file, name = load_hosts(hosts)
    assert file.hosts is not None  # noqa: S101 (load_hosts gives hosts)
    typed, counts, here = TypedProgram(words, os.path.isfile), file.hosts.gpu_counts, Path.cwd()
    read = partial(_read, typed, changes, "--hosts", counts, processes, name)
    job = read(own_folders(here)[0] if typed.is_here else None)
    named = cluster_of_hosts(hosts, job.metadata.name)
    if typed.is_here:
        sending = send_project(HostsBackend(file, named).fleet(), here, job.metadata.name, job.spec.nodes or len(counts), options)
        job = read(asyncio.run(sending))
    again = {"--hosts": hosts, PROCESSES: processes, "--first": options.first, "--without": options.without, "--set": changes}
    return Inputs(job, file, file.cluster.namespace, "--hosts").typed("run", again, words), named


def typed_here(words: Sequence[str], processes: int | None, nodes: int | None, changes: Sequence[str], workspace: Path) -> Inputs:
    """Return the job of a program that runs on this machine, in this folder. Raises ConfigError."""
    gpus, number = gpus_here(), nodes or 1
    each = gpus // number
    if gpus and not each and "gpusPerNode=0" not in _fields(changes):
        raise ConfigError(f"this machine has {number_of(gpus, 'GPU')} for {number} nodes: use fewer, or CPUs (--set gpusPerNode=0)")
    counts: dict[str, int | None] = {f"node {node} of this machine": each for node in range(number)}
    typed, ranks = TypedProgram(words, os.path.isfile), processes or (None if each else 1)
    job = _read(typed, changes, "--local", counts, ranks, None, str(Path.cwd()))
    again = {"--local": True, PROCESSES: processes, "--nodes": nodes, "--workspace": workspace, "--set": changes}
    return Inputs(job, load_cluster(LOCAL_CLUSTER), "", "--local").typed("run", again, words)
