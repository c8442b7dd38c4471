"""The build of Lockstep's text: a gang says so when its agents, or its run.json, are of two."""

from __future__ import annotations

import hashlib
import pkgutil
from functools import cache
from pathlib import Path

import lockstep_machine
import lockstep_spec

BUILD = "BUILD"
"""File with the build in the agent's own file, which has the sources no more where only compiled code is read."""
SHARED = {
    lockstep_machine: ("__init__", "gpus", "limits", "network", "processes", "rdma", "readings"),
    lockstep_spec: ("__init__", "choices", "codec", "cuda", "exits", "files", "handshake", "senders", "words"),
}
"""Modules of other packages that the gang imports; the others are facts that it doesn't need, and arithmetic of the trainer's runs."""


def sources() -> dict[str, Path]:
    """Map the name of each module of an agent, such as lockstep_gang/build.py, to its file; sorted."""
    gang = Path(__file__).parent
    files = {path.relative_to(gang.parent).as_posix(): path for path in gang.rglob("*.py") if path.name != "package.py"}
    for package, modules in SHARED.items():
        folder = Path(str(package.__file__)).parent
        files |= {f"{folder.name}/{module}.py": folder / f"{module}.py" for module in modules}
    return dict(sorted(files.items()))


@cache
def build_id() -> str:
    """Return 12 hexadecimal digits, the same wherever an agent of the same text runs, and where its run.json was written."""
    try:
        recorded = pkgutil.get_data(__package__, BUILD)
    except OSError:
        recorded = None
    if recorded is not None:
        return recorded.decode()
    digest = hashlib.sha256()
    for name, path in sources().items():
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]
