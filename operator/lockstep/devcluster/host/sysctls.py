"""Kernel settings of the whole machine that a kubelet changes when it starts: noted before, put back by `down`."""

from __future__ import annotations

import json
from pathlib import Path

SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def note(record: Path, root: Path = Path("/proc/sys")) -> None:
    """Write down the settings as they are, unless that was done before: a repaired cluster has changed them already."""
    if not record.exists():
        values = {name: (root / name).read_text().strip() for name in SETTINGS if (root / name).exists()}
        temporary = record.with_suffix(".tmp")
        temporary.write_text(json.dumps(values))
        temporary.replace(record)


def restore(record: Path, root: Path = Path("/proc/sys")) -> None:
    """Put the settings back as they were noted; nothing when nothing was."""
    if not record.exists():
        return
    for name, value in json.loads(record.read_text()).items():
        if (root / name).read_text().strip() != value:
            (root / name).write_text(value)
