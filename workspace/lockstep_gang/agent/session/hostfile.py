"""The hostfile of a dev environment, for people's own tools: one line a node, as DeepSpeed and MPI read it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from lockstep_gang.contract.files import read_regular, write_new
from lockstep_gang.contract.run import Run
from lockstep_spec.choices import StorageMode

NAME = "hostfile"


def write_hostfile(run: Run, node: int, say: Callable[[str], None]) -> None:
    """On the volume that all share node 0 writes it, where each has its own every node. Nothing of Lockstep needs it."""
    if node != 0 and run.storage is not StorageMode.PER_POD:
        return
    path = Path(run.working_directory) / NAME
    text = "".join(f"{address} slots={run.ranks_per_node}\n" for address in run.addresses)
    try:
        with contextlib.suppress(OSError):  # it isn't there, or is something else
            if read_regular(path, len(text.encode())) == text.encode():
                return
        draft = path.with_name(f".{NAME}.draft")
        write_new(draft, text.encode())
        draft.replace(path)
    except OSError as error:
        say(f"cannot write {path}: {error}; runs don't need it")
