"""Program that somebody runs in a dev environment: its presence on this node, and the argument list of a rank."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from lockstep_gang.contract.interactive import Asked, Find, Found

PYTHON = "python3"
MODULE = "-m"
DIGEST_BYTES_MAX = 16 * 1024 * 1024


def argv(asked: Asked, local_rank: int) -> tuple[str, ...]:
    """Argument list of a rank. `x.py` and `-m module` go to Python; anything else is a program, of the folder before the PATH."""
    first, *rest = asked.command
    local = [f"--local_rank={local_rank}"] if asked.local_rank else []
    if first == MODULE:
        return (PYTHON, MODULE, *rest[:1], *local, *rest[1:])
    if is_script(first):
        return (PYTHON, first, *local, *rest)
    here = "/" not in first and os.access(Path(asked.folder) / first, os.X_OK)
    return (f"./{first}" if here else first, *local, *rest)


def is_script(first: str) -> bool:
    return first.endswith(".py")


def look(find: Find, node: int) -> Found:
    """Look for the program on this node. Blocking: a volume may be slow."""
    problem = _problem(find, node)
    return Found(find.id, problem, "" if problem else _digest(Path(find.folder) / find.command[0]))


def _problem(find: Find, node: int) -> str:
    folder, first = Path(find.folder), find.command[0]
    if not folder.is_dir():
        return f"node {node} has no folder {folder}: run it from one that every node has, such as /workspace"
    if first == MODULE:
        return "" if len(find.command) > 1 else "-m needs the name of a module"
    path = folder / first
    if is_script(first) and not path.is_file():
        return f"node {node} has no {path}: `lockstep sync` sends your workspace to every node"
    if is_script(first):
        return "" if os.access(path, os.R_OK) else f"{path} on node {node} is not readable: `chmod a+r` it"
    is_program = shutil.which(first) is not None or (path.is_file() and os.access(path, os.X_OK))
    if not is_program and path.is_file():
        return f"{path} on node {node} is not executable: `chmod +x` it, or name a file that ends in .py"
    return "" if is_program else f"node {node} has no program {first}, neither in {folder} nor on the PATH"


def _digest(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > DIGEST_BYTES_MAX:
            return ""
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
