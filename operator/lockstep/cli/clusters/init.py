"""`lockstep init cluster|hosts|job|script`: a commented file to start from. Nothing that exists is written over."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.assets import asset
from lockstep.cli.shared.clusterfiles import is_path, load_cluster, read_text, unseen
from lockstep.cli.shared.folders import clusters_here, from_here
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.target import in_use
from lockstep.cli.shared.terminal import waiting
from lockstep.platforms.output import put, put_text, tell
from lockstep.platforms.places.backends import ahead_of

SCAFFOLDS = Path(__file__).with_name("scaffolds")
STDOUT = "-"
SETTINGS_BYTES = 1 << 20
"""Longest file beside a configuration that is read for its settings."""
SCRIPT_FILES = ("train_multi_node.py", "ds_config.json")

FileOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="The file to write; - is standard output. Default: clusters/NAME.yaml; for a job NAME.yaml.",
        show_default=False,
    ),
]


def cluster(name: Annotated[str, typer.Argument(help="The cluster's name.")], output: FileOption = None) -> None:
    """Write a cluster file with every key explained.

    It writes clusters/NAME.yaml, or the file that -o names.

    Example: lockstep init cluster mine
    """
    from lockstep.api.files.clusterfile import parse_cluster_file

    text = asset("clusters/template.yaml").read_text(encoding="utf-8")
    text = re.sub(
        r"\A#.*\n", f"# The cluster {name}. Remove what you do not need: most keys have defaults. Check it: lockstep cluster list\n", text
    )
    text = re.sub(r"^  name: my-cluster\b", f"  name: {name}", text, count=1, flags=re.MULTILINE)
    path = output or from_here(clusters_here() / f"{name}.yaml")
    parse_cluster_file(text, str(path))  # a name that can't be is refused before anything is written
    _write(path, text, f"Next: edit it, then lockstep deploy {_stated(output) or name} --dry-run")


def hosts(
    name: Annotated[str, typer.Argument(help="The cluster's name.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST]...",
            help=(
                "Its hosts, as NAME, USER@NAME or NAME:SLOTS, as for mpirun. The first runs the coordinator. With --from: take these alone,"
                " in this order."
            ),
        ),
    ] = None,
    origin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A hostfile, an ~/.ssh/config or a config.yaml with cluster.nodes; - reads standard input.",
            show_default=False,
        ),
    ] = None,
    output: FileOption = None,
) -> None:
    """Write a cluster file of machines that you reach over ssh.

    They need no Kubernetes. If you name no hosts, it writes a file to fill in, with every optional key in a comment.

    With --from it reads a hostfile of DeepSpeed or MPI, ssh's configuration, or a config.yaml, lists the settings that a cluster file
    doesn't have, and says where each belongs.

    Example: lockstep init hosts lab lab0 ada@192.168.1.101 lab2:8

    Example: lockstep init hosts lab --from ~/.ssh/config lab0 lab1
    """
    from lockstep.api.files.clusterfile import parse_cluster_file
    from lockstep.api.hosts import DATASETS_FOLDER, WORKSPACE_FOLDER
    from lockstep.plan.discovery.draft import left_out, stated
    from lockstep.plan.translate.hosts import RDMA_OFF, cluster_text, from_words, read_machines, text_to_fill_in
    from lockstep.plan.translate.leaves import leftover_lines

    typed, leftovers = words or [], list[str]()
    if origin is not None:
        machines = read_machines(read_text(origin), str(origin))
        text = cluster_text(name, f"as {origin} lists them", machines.only(typed) if typed else machines, _stated(output))
        lines = [f"  {line}" for line in leftover_lines(str(origin), machines.leftovers)]
        leftovers = [f"network.rdma.enabled: {RDMA_OFF}", *(["It doesn't have:"] if lines else []), *lines]
    elif typed:
        entries = (
            left_out("defaults.user", "ada", "of hosts that name none"),
            stated("defaults.workspace", WORKSPACE_FOLDER, "stands for /workspace"),
            stated("defaults.datasets", DATASETS_FOLDER, "stands for /datasets"),
            stated("storage.mode", "volumeClaimTemplates", "rwx: all hosts see one file system | volumeClaimTemplates: each has its own"),
        )
        text = cluster_text(name, "as they were typed", replace(from_words(typed), entries=entries), _stated(output))
    else:
        text = text_to_fill_in(name, asset("clusters/template-hosts.yaml").read_text(encoding="utf-8"))
    path = output or from_here(clusters_here() / f"{name}.yaml")
    with unseen(f"{origin or 'what you typed'} as a cluster file") as source:  # a name that can't be is refused before anything is written
        parse_cluster_file(text, source)
    named, verb = shlex.quote(_stated(output) or name), "read" if origin or typed else "edit"
    _write(path, text, f"Next: {verb} it, then lockstep hosts setup {named}", *leftovers)


@acts_on("cluster")
def job(
    where: TargetOptions,
    name: Annotated[str, typer.Argument(help="The job's name.")],
    script: Annotated[bool, typer.Option("--script", help="Write a job that runs your own program instead of Lockstep's trainer.")] = False,
    output: FileOption = None,
    origin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A training's config.yaml or command line: of LLaMA-Factory, Axolotl, ms-swift, TRL or a script.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, max=1024, help="With --from: the job's nodes. Default: the cluster's.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node", min=0, max=64, help="With --from: GPUs a node, one rank each. Default: the cluster's; hosts are asked."
        ),
    ] = None,
) -> None:
    """Write a job file. Default: NAME.yaml in this folder.

    With --from, it lists the settings that a job doesn't have, and says where each belongs.

    Example: lockstep init job glm-lora --cluster barcelona

    Example: lockstep init job glm-lora --cluster barcelona --from config.yaml --nodes 2 --gpus-per-node 8
    """
    from lockstep.api.files.jobfile import parse_job_file

    choice = None if where.cluster is not None else in_use()
    cluster = where.cluster if choice is None else choice.cluster
    path = output or Path(f"{name}.yaml")
    if origin is not None:
        if script:
            raise ConfigError("--script is for a program of your own, --from for Lockstep's trainer: use one of them")
        return _from_config(origin, name, cluster, (nodes, gpus), path)
    if nodes is not None or gpus is not None:
        raise ConfigError("--nodes and --gpus-per-node need --from: leave them out, and edit the file that is written")
    cluster = load_cluster(cluster).cluster.name if cluster is not None and is_path(cluster) else cluster
    text = (SCAFFOLDS / ("script-job.yaml" if script else "job.yaml")).read_text(encoding="utf-8")
    if cluster is None:
        text = re.sub(
            r"  cluster: CLUSTER .*", "  # cluster: mine            # a file in clusters/; left out: the one that it is sent to", text
        )
    for word, value in (("NAME", name), ("CLUSTER", cluster or ""), ("FILE", _stated(path) or f"{name}.yaml")):
        text = re.sub(rf"\b{word}\b", value.replace("\\", r"\\"), text)
    parse_job_file(text, str(path))
    file = shlex.quote(_stated(path) or f"{name}.yaml")
    _write(path, text, f"Next: edit it, then lockstep validate -f {file}, and lockstep run -f {file}")
    return None


def _from_config(origin: Path, name: str, cluster: str | None, wanted: tuple[int | None, int | None], path: Path) -> None:
    from lockstep.api.files.jobfile import parse_job_file
    from lockstep.plan.ahead.standin import stand_in
    from lockstep.plan.translate.leaves import leftover_lines
    from lockstep.plan.translate.trainer import job_text
    from lockstep.platforms.jobs.planfacts import moved_targets_here

    file = load_cluster(cluster) if cluster is not None else stand_in()
    with waiting("asking for the GPUs"):
        size, problems = ahead_of(file.kind).size(file, cluster or file.cluster.name, *wanted)
    for problem in problems:
        tell(f"warning: the job's number of ranks is not known (--gpus-per-node states it): {problem}")
    named = file.cluster.name if cluster is not None else None
    translation = job_text(read_text(origin), str(origin), name, named, size, _beside(origin))
    training = parse_job_file(translation.text, str(path)).spec.training
    moved = moved_targets_here(training, Path(translation.model)) if training is not None else ""
    leftovers = [f"  {line}" for line in leftover_lines(str(origin), translation.leftovers)]
    then = f"Next: read it, then lockstep validate -f {shlex.quote(_stated(path) or f'{name}.yaml')}"
    _write(
        path, translation.text, *(["It doesn't have:"] if leftovers else []), *leftovers, *([f"warning: {moved}"] if moved else []), then
    )


def _beside(origin: Path) -> Callable[[str], str | None]:
    """Return a reader of files that another file names, beside it, in a folder above it, or in this one. A folder, and a file that is too
    long to be settings, is empty text.
    """
    folders = [Path(), *(() if str(origin) == STDOUT else origin.resolve().parents)]

    def read(path: str) -> str | None:
        try:
            there = next((folder / path for folder in folders if path and (folder / path).exists()), None)
            if there is None or there.is_dir() or there.stat().st_size > SETTINGS_BYTES:
                return None if there is None else ""
            return there.read_text(encoding="utf-8-sig")
        except (OSError, ValueError):
            return None

    return read


def script(folder: Annotated[Path, typer.Argument(help="Where to write them.")] = Path()) -> None:
    """Write a DeepSpeed script that runs on any number of nodes.

    It writes train_multi_node.py and ds_config.json. The script saves when it is asked to stop, and goes on from there later.

    Example: lockstep init script workspace
    """
    taken = [str(folder / name) for name in SCRIPT_FILES if (folder / name).exists()]
    if taken:
        raise ConfigError(f"{', '.join(taken)} already exists: name another folder")
    for name in SCRIPT_FILES:
        _write(folder / name, asset(f"workspace/{name}").read_text(encoding="utf-8"))
    put("Next: put your model and your data where its two comments say; a job for it: lockstep init job NAME --script")


def _stated(output: Path | None) -> str | None:
    """Return the path of the file that is written, as it was typed; None where its usual one counts, or standard output gets it."""
    return None if output is None or str(output) == STDOUT else str(output)


def _write(path: Path, text: str, *following: str) -> None:
    """Write a new file, and tell what follows. `-` is standard output. Raises ConfigError for a file that exists, or can't be written."""
    if str(path) == STDOUT:
        put_text(text)
        for line in following:
            tell(line)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} already exists: name another file with -o") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
    put(f"Wrote {path}", *following)
