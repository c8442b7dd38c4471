"""Readers of commits, from which rotation keeps away, on a volume that any number of machines share.

A reader puts a file beside the commits that names the one it reads, and counts up in it while it lives (`lockstep_spec/files.py`). Rotation
takes a reader for dead when its file has not changed for ten minutes, and clears away what it leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep_spec.files import Signs, make_directory, write_durably
from lockstep_train.checkpoint.format.layout import READERS, CommitName, parse_commit, parse_reader

BEAT_SECONDS = 30.0
DEAD_SECONDS = 600.0


@contextlib.contextmanager
def reading(commit: Path, reader: str, beat_seconds: float = BEAT_SECONDS) -> Iterator[bool]:
    """Hold a commit while it is read; `reader` says who, for people. Gives False when the volume can't be written to: nothing is
    held then. Raises FileNotFoundError when the commit is gone already.

    The file is written before the commit is looked at, and rotation renames before it looks for files: one sees the other.
    """
    file = commit.parent / READERS / f"{commit.name}.{secrets.token_hex(8)}.json"
    held = parse_commit(commit.name) is not None and _beat(file, reader, 0)
    done = threading.Event()
    thread = threading.Thread(target=_keep_beating, args=(file, reader, done, beat_seconds), name="lockstep-reader", daemon=True)
    try:
        if not commit.is_dir():
            raise FileNotFoundError(f"{commit} is gone: it was rotated away")
        if held:
            thread.start()
        yield held
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
        with contextlib.suppress(OSError):
            file.unlink()


def _keep_beating(file: Path, reader: str, done: threading.Event, beat_seconds: float) -> None:
    count = 1
    while not done.wait(beat_seconds):
        _beat(file, reader, count)
        count += 1


def _beat(file: Path, reader: str, count: int) -> bool:
    try:
        make_directory(file.parent)
        write_durably(file, json.dumps({"reader": reader, "count": count}).encode())
    except OSError:
        return False
    return True


class ReaderWatch:
    """Rotation's view of the readers of one checkpoints folder. `clock` is monotonic, in seconds."""

    def __init__(self, checkpoints: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = checkpoints / READERS
        self._signs = Signs(clock)

    def held(self) -> set[CommitName]:
        """Commits with a living reader. Files of dead ones are removed."""
        current = self._contents()
        dead = [name for name, seconds in self._signs.unchanged_seconds(current).items() if seconds >= DEAD_SECONDS]
        for name in dead:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
        return {commit for name in current if name not in dead and (commit := parse_reader(name)) is not None}

    def _contents(self) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        with contextlib.suppress(OSError):
            for entry in self._folder.iterdir():
                if parse_reader(entry.name) is not None:
                    contents[entry.name] = b""
                    with contextlib.suppress(OSError):
                        contents[entry.name] = entry.read_bytes()
        return contents
