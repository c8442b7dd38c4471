"""The environment that has torch and the trainer's packages, and verbs of the trainer, each a process of its own: the command line knows
nothing of its code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.terminal import waiting
from lockstep.platforms.local.environment import in_full_environment
from lockstep.platforms.output import ProgramOutput
from lockstep_spec.exits import CONFIGURATION, FAILED, USAGE

NEEDS = {
    "inspect": ("lockstep_train",),
    "proof": ("lockstep_train", "torch", "peft", "huggingface_hub"),
    "merge": ("lockstep_train", "torch", "peft"),
    "chat": ("lockstep_train", "torch", "peft"),
    "push": ("lockstep_train", "huggingface_hub"),
    "fetch": ("lockstep_train", "numpy", "huggingface_hub"),
}
"""The trainer's modules, and the packages that each needs."""
AT_FIRST = {
    "inspect": "reading",
    "proof": "importing torch, then writing the adapter",
    "merge": "importing torch and peft",
    "chat": "importing torch and peft, and loading the model",
    "push": "asking the hub",
    "fetch": "asking for the model",
}
"""Activity of each until it says something."""


def trainer_command(module: str, arguments: Sequence[str | Path]) -> list[str]:
    """Return the argument list of a module of the trainer, in an environment that has its packages. Raises Failed where none can be made,
    ConfigError for a missing source.
    """
    in_full_environment(NEEDS[module], lambda: _require_sources(arguments))
    return [sys.executable, "-m", f"lockstep_train.{module}", *map(str, arguments)]


def _require_sources(arguments: Sequence[str | Path]) -> None:
    for option, path in pairwise(("", *arguments)):
        if isinstance(path, Path) and option not in ("--output", "--cache") and not path.exists():
            raise ConfigError(f"there is no {path} on this machine: name a folder that is there")


def run_trainer(module: str, arguments: Sequence[str | Path]) -> None:
    """Run it, with its output on ours. Raises typer.Exit when it fails."""
    command = trainer_command(module, arguments)
    with waiting(AT_FIRST[module]) as heard:
        code = _run(command, ProgramOutput().put, heard)
    raise_for(code)


def ask_trainer(module: str, arguments: Sequence[str | Path]) -> tuple[str, int]:
    """Return what it prints, and its exit code: 0, or 1 for an answer that is bad news. Raises typer.Exit when it gives none."""
    answer = bytearray()
    code = _run(trainer_command(module, arguments), answer.extend)
    if not answer:
        raise_for(code or FAILED)
    return answer.decode(errors="replace"), code


def _run(command: list[str], show: Callable[[bytes], object], heard: Callable[[], None] = lambda: None) -> int:
    """Its exit code; `show` gets its standard output as it comes. What it says comes out of folders that a pod may have written, errors
    too.

    `heard` is called before anything that it says is shown.

    A Ctrl-C of the terminal is ours alone: it ends the process, which would else die with a traceback.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0) as process, DefaultSelector() as pipes:
        try:
            pipes.register(process.stdout or 0, EVENT_READ, show)
            pipes.register(process.stderr or 0, EVENT_READ, ProgramOutput(error=True).put)
            while pipes.get_map():
                for pipe, _ in pipes.select():
                    data = os.read(pipe.fd, 1 << 16)
                    if data:
                        heard()
                    pipe.data(data)
                    if not data:
                        pipes.unregister(pipe.fileobj)
        except BaseException:
            process.kill()
            raise
    return process.returncode


def raise_for(code: int) -> None:
    if code:
        raise typer.Exit(USAGE if code == CONFIGURATION else FAILED)
