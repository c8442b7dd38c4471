"""A program on some hosts or on this machine, as one types it for torchrun or mpirun, as a job file. Words in, text out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from posixpath import basename, isabs, normpath
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.files.yamltext import dump_yaml
from lockstep.api.names import API_VERSION, JOB_NAME_MAX
from lockstep_spec.files import module_files
from lockstep_spec.words import number_of

PROCESSES = "--nproc-per-node"
CPU_RANKS = f" (one for each GPU), or on CPUs: {PROCESSES} 2 --set gpusPerNode=0"
MODULE = "-m"


class TypedProgram:
    """A program as it is typed: a Python file, `-m` and a module, or a program with its arguments. Raises ConfigError for what is none."""

    def __init__(self, words: Sequence[str], is_here: Callable[[str], bool] = lambda path: False) -> None:
        """`is_here`: tells whether there is such a file in the folder where it is typed."""
        if not "".join(words[:1]) or (words[0].startswith("-") and words[0] != MODULE):
            raise ConfigError("name what to run, behind --: -- train.py --epochs 3, -- -m package.module, or -- bash run.sh")
        refuse_launcher(words)
        first, *rest = words
        files: tuple[str, ...]
        fields: dict[str, Any]
        if first == MODULE:
            if not rest:
                raise ConfigError("-m needs the name of a module: -- -m package.module --epochs 3")
            name, *rest = rest
            files, fields = module_files(name), {"module": name}
        elif first.endswith(".py"):
            name, files, fields = first, (first,), {"path": normpath(first)}
        else:
            count = next((number for number, word in enumerate(rest, 1) if not word.startswith("-")), 0)
            files = (first, *rest[:count]) if count and not is_here(first) and is_here(rest[count - 1]) else (first,)
            program = f"./{first}" if "/" not in first and is_here(first) else first
            name, rest, fields = files[-1], rest[len(files) - 1 :], {"command": [program, *files[1:]]}
        outside = next((file for file in files if normpath(file).partition("/")[0] == ".."), None)
        if outside is not None:
            raise ConfigError(f"{outside}: is outside of the folder that is run: change to its folder first, or name an absolute path")
        modules = [file for option, module in pairwise(rest) if option == MODULE for file in module_files(module)]
        self.is_here = any(is_here(file) for file in (*files, *(() if files[0].endswith(".py") else (*rest, *modules))) if not isabs(file))
        """True if a file that is named is in the folder where it is typed: of a program that isn't Python, any of its arguments."""
        self.job = _job_name(name.rpartition(".")[2] if first == MODULE else name)
        self.fields: dict[str, Any] = {**fields, **({"args": rest} if rest else {})}
        """Fields of spec.script."""


LAUNCHERS = (
    "torchrun", "deepspeed", "accelerate", "mpirun", "mpiexec", "horovodrun", "torch.distributed.run", "torch.distributed.launch",
    "deepspeed.launcher.runner", "accelerate.commands.launch",
)  # fmt: skip
"""Programs and modules that start ranks."""


def refuse_launcher(words: Sequence[str]) -> None:
    """Raise ConfigError for a launcher that would start its ranks once more on every rank, with the words to type instead."""
    started = [words[0], *(word for option, word in pairwise(words[:3]) if option == MODULE)]
    launcher = next((word for word in started if basename(word) in LAUNCHERS), None)
    if launcher is None:
        return
    at = words.index(launcher) + 1
    start = next((n for n in range(at, len(words)) if words[n].endswith(".py") or words[n] in (MODULE, "--module")), len(words))
    program = [MODULE if word == "--module" else word for word in words[start:]] or ["train.py"]
    count = re.search(r"--?(?:nproc[-_]per[-_]node|num[-_]gpus)[= ](\d+)", " ".join(words[at:start]))
    options = f"{PROCESSES} {count[1]} " if count else ""
    raise ConfigError(
        f"{basename(launcher)} would start all ranks again on each rank: leave it and its options out: {options}-- {shlex.join(program)}"
    )


def script_job(
    typed: TypedProgram,
    nodes: Mapping[str, int | None],
    processes: int | None,
    cluster: str | None,
    folder: str | None = None,
    *,
    ranks_stated: bool = False,
) -> str:
    """The job file of a program on these nodes.

    `nodes`: GPUs of each that jobs may take; None: not stated. `processes`: ranks of each; None: one for each GPU. `cluster`: name of their
    cluster file in clusters/, if they have one. `folder`: where ranks work; None: below /workspace. `ranks_stated`: the fields of ranks are
    changed anyway.

    Raises ConfigError for a number of ranks that isn't known or that the nodes don't have the GPUs for.
    """
    lines = [
        "# A program that was typed, as a job file. Every field there is: docs/reference/trainingjob.md",
        f"apiVersion: {API_VERSION}",
        "kind: TrainingJob",
        "metadata:",
        f"  name: {typed.job}",
        "spec:",
        *([f"  cluster: {cluster}"] if cluster else []),
        f"  nodes: {len(nodes)}  # {', '.join(nodes)}",
        *([] if ranks_stated and processes is None else _ranks([*nodes.values()], processes)),
        "  script:",
        *(_indented({"folder": folder}) if folder else []),
        *_indented(typed.fields),
        "  restart:",
        "    maxRestarts: 0  # as torchrun by default; a script that finds its own checkpoints may have more",
    ]
    return "\n".join(lines) + "\n"


def _indented(fields: dict[str, Any]) -> list[str]:
    return [f"    {line}" for line in dump_yaml(fields).splitlines()]


def _job_name(path: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\.(py|sh)$", "", basename(path)).lower()).strip("-")
    return (words if re.match(r"[a-z]", words) else f"run-{words}".rstrip("-"))[:JOB_NAME_MAX].rstrip("-")


def _ranks(counts: Sequence[int | None], processes: int | None) -> Iterator[str]:
    stated = [count for count in counts if count is not None]
    gpus = min(stated) if len(stated) == len(counts) else None
    if processes is None and not gpus:
        known = "have no GPU" if gpus == 0 else "state no GPUs"
        raise ConfigError(f"the hosts {known}: say how many ranks each has: {PROCESSES} 2{CPU_RANKS if gpus is None else ''}")
    if gpus == 0:
        yield "  gpusPerNode: 0  # ranks run on CPUs, over gloo"
        yield f"  ranksPerNode: {processes}"
    elif gpus is None:
        yield f"  gpusPerNode: {processes}  # one rank for each GPU; for ranks on CPUs: gpusPerNode: 0 and ranksPerNode: {processes}"
    elif processes is not None and processes > gpus:
        raise ConfigError(f"{PROCESSES} is {processes}, and a node offers {number_of(gpus, 'GPU')}: every GPU has one rank")
    else:
        fewest = ", the fewest of any host" if processes is None and len(set(stated)) > 1 else ""
        yield f"  gpusPerNode: {processes or gpus}  # one rank for each GPU{fewest}"
