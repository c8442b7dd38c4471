"""What modules import, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path


def modules_of(root: Path) -> Mapping[str, Path]:
    """Dotted name → file, of every module below this folder; of a package, its `__init__.py`."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imported(tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    """Those of the known modules that are imported, also within functions and for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (member for member in members if member in known)
            if node.module in known and any(member not in known for member in members):
                yield node.module
