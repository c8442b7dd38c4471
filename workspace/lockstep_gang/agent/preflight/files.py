"""Paths that ranks read, the volume that they write to, and markers that show which nodes see the same folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lockstep_gang.contract.preflight import ExpectedPath, Kind, PathFact, VolumeFacts
from lockstep_spec.files import open_regular, other_interpreter, read_regular, write_durably

MARKER = ".preflight-"
SEEN_SECONDS = 3.0
"""Time that a file of another node may take to show up on a volume that is said to be shared."""
_LOOK_SECONDS = 0.1


def path_facts(expected: Iterable[ExpectedPath], folder: str) -> tuple[PathFact, ...]:
    """Kind of each path, or why it can't be read; relative paths are below `folder`."""
    return tuple(replace(_path_fact(item, Path(folder) / item.path), field=item.field) for item in expected)


def _path_fact(item: ExpectedPath, path: Path) -> PathFact:
    try:
        kind = Kind.FOLDER if path.is_dir() else Kind.FILE if path.stat() else None
        if kind is Kind.FOLDER:
            next(path.iterdir(), None)
        else:
            with os.fdopen(open_regular(path, follow=True), "rb") as file:
                file.read(1)
    except (FileNotFoundError, NotADirectoryError):
        return PathFact(item.path)
    except OSError as error:
        return PathFact(item.path, error=error.strerror or str(error))
    interpreter = other_interpreter(path) if item.field == "spec.script.path" and kind is Kind.FILE else ""
    return PathFact(item.path, kind.value if kind is not None else "", interpreter=interpreter)


def marker(run_dir: str, token: str, node: int) -> Path:
    return Path(run_dir) / "gang" / f"{MARKER}{token}.{node}"


def volume_facts(run_dir: str, token: str, node: int) -> VolumeFacts:
    """Leave this node's marker in the run's folder, which shows that the folder can be written and which the others look for."""
    own = marker(run_dir, token, node)
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        remove_markers(run_dir, node)
        write_durably(own, token.encode())
        free = shutil.disk_usage(run_dir).free
        return VolumeFacts(free_bytes=free, checkpoint_bytes=_newest_checkpoint_bytes(Path(run_dir) / "checkpoints"), path=run_dir)
    except OSError as error:
        return VolumeFacts(error.strerror or str(error), path=run_dir)


def _newest_checkpoint_bytes(folder: Path) -> int:
    """Size of the last checkpoint: the next one will be about as large."""
    with contextlib.suppress(OSError):
        commits = [entry for entry in os.scandir(folder) if entry.name.startswith("step-") and entry.is_dir()]
        if commits:
            newest = max(commits, key=lambda entry: entry.stat().st_mtime)
            return sum(path.stat().st_size for path in Path(newest.path).rglob("*") if path.is_file())
    return 0


def remove_markers(run_dir: str, node: int) -> None:
    """Remove the markers of this node, those of killed processes too."""
    with contextlib.suppress(OSError):
        for path in (Path(run_dir) / "gang").glob(f"{MARKER}*.{node}"):
            path.unlink(missing_ok=True)


def remove_empty_folders(run_dir: str) -> None:
    """Remove the folders that a look without a run has made; folders that hold anything stay."""
    with contextlib.suppress(OSError):
        (Path(run_dir) / "gang").rmdir()
        Path(run_dir).rmdir()


def sees(path: Path, token: str, seconds: float) -> bool:
    """Return True once another node's marker is there, False after so long. Nobody asked for its name before, so no cache denies it."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if read_regular(path, len(token)) == token.encode():
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
