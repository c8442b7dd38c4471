"""Sends the small files of a run's folder as tar on standard output: the end of long ones, and nothing of models and checkpoints.

Its arguments are the folder, or the run.json that names it, and the most bytes of a file and of all of them.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from pathlib import Path

SKIPPED = frozenset({"checkpoints", "adapter", "model", "cache", "offload"})


def send(root: str, file_bytes: int, all_bytes: int) -> None:
    """Write the archive."""
    rest = all_bytes
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for folder, below, files in os.walk(root):
            below[:] = sorted(name for name in below if name not in SKIPPED and not name.startswith("checkpoint-"))
            for name in sorted(files):
                path = Path(folder, name)
                if name.startswith("drill-") or not path.is_file() or rest <= 0:
                    continue
                with path.open("rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - file_bytes))
                    data = file.read(min(file_bytes, rest))
                rest -= len(data)
                entry = tarfile.TarInfo(os.path.relpath(path, root))
                entry.size, entry.mtime = len(data), int(path.stat().st_mtime)
                archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    source = sys.argv[1]
    send(
        source if Path(source).is_dir() else json.loads(Path(source).read_text(encoding="utf-8"))["runDir"],
        int(sys.argv[2]),
        int(sys.argv[3]),
    )
