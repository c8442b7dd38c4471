"""Programs that run in pods: sent there as text, for the Python (3.10 or newer) of whatever image a job has, so they import only the standard library.

A program may import from other modules of this folder. `source_of` is the one place where their texts are joined.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import ModuleType

_FUTURE = "from __future__ import annotations\n"
_SHARED = re.compile(rf"^from {re.escape(__name__)}\.(\w+) import (?:\([^)]*\)|[^\n(]*)\n", re.MULTILINE)


@cache
def source_of(program: ModuleType) -> bytes:
    """Text of a program: its own, after that of the modules of this folder that it imports."""
    texts: dict[str, str] = {}

    def add(path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        for shared in _SHARED.findall(text):
            if shared not in texts:
                add(Path(__file__).with_name(f"{shared}.py"))
        texts[path.stem] = _SHARED.sub("", text).replace(_FUTURE, "")

    assert program.__file__ is not None  # noqa: S101 (it is no package)
    add(Path(program.__file__))
    return "\n".join([_FUTURE, *texts.values()]).encode()
