"""A program that is typed behind `--`, as a job: on hosts, to which its folder is sent, or on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.api.errors import ConfigError
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.names import HOSTS
from lockstep.cli.shared.clusterfiles import LOCAL_CLUSTER, cluster_of_hosts, load_cluster, load_hosts
from lockstep.cli.shared.inputs import Inputs
from lockstep.plan.translate.adhoc import PROCESSES, TypedProgram, script_job
from lockstep.platforms.files.sync import own_folders
from lockstep.platforms.hosts.backend import HostsBackend
from lockstep.platforms.hosts.sync import send_project
from lockstep.platforms.places.backends import words_to
from lockstep.platforms.places.orders import LOCAL, HostOptions
from lockstep_machine.gpus import gpu_devices
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob
    from lockstep.cli.shared.jobargs import TargetOptions


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


class TypedLine(NamedTuple):
    """A program as a command line has it."""

    words: Sequence[str]
    hosts: str
    """Value of --hosts; '': it runs on this machine."""
    nodes: int | None
    processes: int | None
    """Ranks of a node."""
    changes: Sequence[str]
    options: HostOptions


def typed_program(place: str, where: TargetOptions, program: TypedLine) -> tuple[Inputs, TargetOptions]:
    """Return the job of the program, and the place that it names. Raises ConfigError, Failed."""
    return {HOSTS: _on_hosts, LOCAL: _here}[place](where, program)


def _on_hosts(where: TargetOptions, program: TypedLine) -> tuple[Inputs, TargetOptions]:
    """Return the job on the hosts. If the program is in this folder, send that to a folder of its own, where ranks will work."""
    words, hosts, _, processes, changes, options = program
    where.refuse_kubernetes("--hosts")
    file, name = load_hosts(hosts)
    typed, counts, here = TypedProgram(words, os.path.isfile), file.its_hosts(hosts).gpu_counts, Path.cwd()
    read = partial(_read, typed, changes, "--hosts", counts, processes, name)
    job = read(own_folders(here)[0] if typed.is_here else None)
    named = cluster_of_hosts(hosts, job.metadata.name)
    if typed.is_here:
        sending = send_project(HostsBackend(file, named).fleet(), here, job.metadata.name, job.spec.nodes or len(counts), options)
        job = read(asyncio.run(sending))
    again = {"--hosts": hosts, PROCESSES: processes, "--first": options.first, "--without": options.without, "--set": changes}
    return Inputs(job, file, file.cluster.namespace, "--hosts").typed("run", again, words), replace(where, cluster=named)


def _here(where: TargetOptions, program: TypedLine) -> tuple[Inputs, TargetOptions]:
    """Return the job on this machine, in this folder."""
    words, _, nodes, processes, changes, _ = program
    gpus, number = gpu_devices(), nodes or 1
    each = gpus // number
    if gpus and not each and "gpusPerNode=0" not in _fields(changes):
        raise ConfigError(f"this machine has {number_of(gpus, 'GPU')} for {number} nodes: use fewer, or CPUs (--set gpusPerNode=0)")
    counts: dict[str, int | None] = {f"node {node} of this machine": each for node in range(number)}
    typed, ranks = TypedProgram(words, os.path.isfile), processes or (None if each else 1)
    job = _read(typed, changes, "--local", counts, ranks, None, str(Path.cwd()))
    again = {**words_to(Path(where.named)), PROCESSES: processes, "--nodes": nodes, "--set": changes}
    return Inputs(job, load_cluster(LOCAL_CLUSTER), "", "--local").typed("run", again, words), where
