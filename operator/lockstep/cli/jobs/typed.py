"""A program that is typed behind `--`, as a job: on hosts, to which its folder is sent, or on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.files.yamltext import dump_yaml
from lockstep.cli.shared.clusterfiles import cluster_of_hosts, load_cluster, load_hosts
from lockstep.cli.shared.hostsite import HostSite
from lockstep.cli.shared.inputs import Inputs
from lockstep.cli.shared.sending import send_project
from lockstep.plan.translate.adhoc import PROCESSES, TypedProgram, script_job
from lockstep.platforms.files.sync import own_folders
from lockstep.platforms.hosts.start import HostOptions
from lockstep.platforms.local.placement import gpus_here
from lockstep.platforms.output import put_text

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob

LOCAL_CLUSTER = "local"


class TypedJob:
    """A typed program on these nodes: `changes` (--set) apply to its job file."""

    def __init__(self, words: Sequence[str], changes: Sequence[str], source: str) -> None:
        self._changes, self._source = changes, source
        self.program = TypedProgram(words, lambda name: Path(name).is_file())

    def read(
        self, nodes: Mapping[str, int | None], processes: int | None, cluster: str | None, folder: str | None
    ) -> tuple[str, TrainingJob]:
        """Return the text of the job file, and the job. Parameters: as of `script_job`. Raises ConfigError."""
        stated = any(change.removeprefix("spec.").startswith(("ranksPerNode=", "gpusPerNode=")) for change in self._changes)
        text = script_job(self.program, nodes, processes, cluster, folder, ranks_stated=stated)
        job = parse_job_file(text, self._source, self._changes)
        return dump_yaml(job.written()) if self._changes else text, job


def typed_on_hosts(
    hosts: str, words: Sequence[str], processes: int | None, changes: Sequence[str], options: HostOptions, *, render: bool
) -> tuple[Inputs, str]:
    """Return the job, and its cluster as it is named. If the program is in this folder, it is sent to a folder of its own, where ranks will work.

    With `render` print its file, and end. Raises ConfigError, Failed.
    """
    file, name = load_hosts(hosts)
    if file.hosts is None:
        raise AssertionError("load_hosts gives hosts")
    typed, counts, here = TypedJob(words, changes, "--hosts"), file.hosts.gpu_counts, Path.cwd()
    text, job = typed.read(counts, processes, name, own_folders(here)[0] if typed.program.is_here else None)
    _end_rendered(text, render=render)
    named = cluster_of_hosts(hosts, job.metadata.name)
    if typed.program.is_here:
        folder = send_project(HostSite(file, named), here, job.metadata.name, job.spec.nodes or len(counts), options)
        job = typed.read(counts, processes, name, folder)[1]
    again: dict[str, object] = {
        "--hosts": hosts,
        PROCESSES: processes,
        "--first": options.first,
        "--without": options.without,
        "--set": changes,
    }
    return Inputs(job, file, file.cluster.namespace, "--hosts").typed("run", again, words), named


def typed_here(words: Sequence[str], processes: int | None, nodes: int, changes: Sequence[str], workspace: Path, *, render: bool) -> Inputs:
    """Return the job of a program that runs on this machine, in this folder. With `render` print its file, and end. Raises ConfigError."""
    each = gpus_here() // nodes
    counts: dict[str, int | None] = {f"node {node} of this machine": each for node in range(nodes)}
    text, job = TypedJob(words, changes, "--local").read(counts, processes or (None if each else 1), None, str(Path.cwd()))
    _end_rendered(text, render=render)
    again: dict[str, object] = {"--local": True, PROCESSES: processes, "--nodes": nodes, "--workspace": workspace, "--set": changes}
    return Inputs(job, load_cluster(LOCAL_CLUSTER), "", "--local").typed("run", again, words)


def _end_rendered(text: str, *, render: bool) -> None:
    if render:
        put_text(text)
        raise typer.Exit
