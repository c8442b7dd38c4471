"""Find out whether folders of several hosts are one: each writes a file whose name nobody can know, and looks for those of the others.

A line of JSON comes in with the `folder`, of which the nearest part that exists is taken; a line goes out with the `mark` there, or with
the `problem` that keeps it from being written. Then a line comes in with all `marks`, and a line goes out with those that are `seen` there.
The mark is removed at the end, also when the connection breaks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lockstep_machine.readings import nearest

MARK = ".lockstep-cp-volume-"
"""Beginning of the names, which is also that of drafts: no copy takes such a file along."""
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.1
OLD_SECONDS = 3600.0
LINE_BYTES_MAX = 1 << 20


def heard() -> dict[str, Any]:
    """Next line. Ends the program when none comes for a minute."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > LINE_BYTES_MAX or not select.select([0], [], [], PATIENCE_SECONDS)[0]:
            sys.exit("no question came")
        piece = os.read(0, 1 << 16)
        if not piece:
            sys.exit(0)
        line += piece
    value = json.loads(line)
    return value if isinstance(value, dict) else {}


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


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = nearest(Path(heard()["folder"]).expanduser())
    mark = folder / f"{MARK}{secrets.token_hex(16)}"
    forget_old(folder)
    try:
        try:
            mark.touch()
            print(json.dumps({"mark": mark.name}), flush=True)
        except OSError as error:
            print(json.dumps({"problem": f"{folder}: {error.strerror}"}), flush=True)
        question = heard()
        print(json.dumps({"seen": present(folder, question["marks"], question["seconds"])}), flush=True)
        heard()
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


if __name__ == "__main__":
    main()
