"""Find out whether folders of several hosts are one: each writes a file whose name nobody can know, and looks for those of the others.

A line of JSON comes in with the `folder`, of which the nearest part that exists is taken; a line goes out with the `mark` there, or with
the `problem` that keeps it from being written. Then a line comes in with all `marks`, and a line goes out with those that are `seen` there.
The mark is removed at the end, also when the connection breaks.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import time
from pathlib import Path

from lockstep_machine.readings import nearest
from lockstep_machine.wire import CarryError, Gone, Wire

MARK = ".lockstep-cp-volume-"
"""Beginning of the names, which is also that of drafts: no copy takes such a file along."""
POLL_SECONDS = 0.1
OLD_SECONDS = 3600.0


def present(folder: Path, marks: list[str], seconds: float) -> list[str]:
    """Marks that are there, or appear within so many seconds: a network file system may answer from a cache."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            list(folder.iterdir())  # (some clients look again only then)
        seen = [mark for mark in marks if (folder / mark).exists()]
        if len(seen) == len(marks) or time.monotonic() >= end:
            return seen
        time.sleep(POLL_SECONDS)


def forget_old(folder: Path) -> None:
    """Remove marks of hosts that lost their power meanwhile."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{MARK}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > OLD_SECONDS:
                    path.unlink()


def main(wire: Wire) -> None:
    """Raises CarryError, Gone once the other end has left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = nearest(Path(wire.hear()["folder"]).expanduser())
    mark = folder / f"{MARK}{secrets.token_hex(16)}"
    forget_old(folder)
    try:
        try:
            mark.touch()
            wire.say({"mark": mark.name})
        except OSError as error:
            wire.say({"problem": f"{folder}: {error.strerror}"})
        question = wire.hear()
        wire.say({"seen": present(folder, question["marks"], question["seconds"])})
        wire.hear()
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


if __name__ == "__main__":
    with contextlib.suppress(CarryError, Gone):
        main(Wire(0, 1))
