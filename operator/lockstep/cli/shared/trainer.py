"""Verbs of the trainer's package: each runs as a process of its own, since the command line knows nothing of the trainer's code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import typer

from lockstep.api.errors import ConfigError
from lockstep.platforms.output import ProgramOutput
from lockstep_spec.exits import CONFIGURATION

EXIT_FAILED = 1
EXIT_USAGE = 2


NEEDS = {
    "inspect": ("lockstep_train",),
    "export": ("lockstep_train", "torch", "safetensors"),
    "merge": ("lockstep_train", "torch", "peft"),
    "generate": ("lockstep_train", "torch", "peft"),
    "fetch": ("lockstep_train", "numpy", "huggingface_hub"),
}
"""The trainer's modules, and the packages that each needs."""
AT_FIRST = {
    "inspect": "reading",
    "export": "importing torch, then writing the adapter",
    "merge": "importing torch and peft",
    "generate": "importing torch and peft, then loading the model",
    "fetch": "asking for the model",
}
"""Activity of each until it says something."""


def trainer_command(module: str, arguments: Sequence[str | Path]) -> list[str]:
    """The argument list of a module of the trainer. Raises ConfigError where the trainer isn't installed."""
    if any(importlib.util.find_spec(package) is None for package in NEEDS[module]):
        raise ConfigError(f"{sys.executable} has no trainer; install lockstep[train], or run this in the trainer's image")
    return [sys.executable, "-m", f"lockstep_train.{module}", *map(str, arguments)]


def run_trainer(module: str, arguments: Sequence[str | Path]) -> None:
    """Run it, with its output on ours. Raises typer.Exit when it fails."""
    from lockstep.cli.shared.terminal import waiting

    command = trainer_command(module, arguments)
    with waiting(AT_FIRST[module]) as heard:
        code = _run(command, ProgramOutput().put, heard)
    raise_for(code)


def ask_trainer(module: str, arguments: Sequence[str | Path]) -> tuple[str, int]:
    """Return what it prints, and its exit code: 0, or 1 for an answer that is bad news. Raises typer.Exit when it gives none."""
    answer = bytearray()
    code = _run(trainer_command(module, arguments), answer.extend)
    if not answer:
        raise_for(code or EXIT_FAILED)
    return answer.decode(errors="replace"), code


def _run(command: list[str], show: Callable[[bytes], object], heard: Callable[[], None] = lambda: None) -> int:
    """Its exit code; `show` gets its standard output as it comes. What it says comes out of folders that a pod may have written, errors too.

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
        raise typer.Exit(EXIT_USAGE if code == CONFIGURATION else EXIT_FAILED)
