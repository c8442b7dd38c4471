"""Programs that run in pods: sent there as text, for the Python (3.10 or newer) of whatever image a job has, so they import only the
standard library.

A program may import from other modules of this folder and of `onhost`, from `lockstep_machine`, and what the gang's contract is made of.
`source_of` is the one place where their texts are joined.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_FUTURE = "from __future__ import annotations\n"
_JOINED = rf"(?:{re.escape(__name__)}|lockstep\.platforms\.onhost|lockstep_gang\.contract|lockstep_machine|lockstep_spec)\.\w+"
_SHARED = re.compile(rf"^from ({_JOINED}) import (?:\([^)]*\)|[^\n(]*)\n", re.MULTILINE)
_MAIN = re.compile(r'^if __name__ == "__main__":\n(?:    .*\n)+', re.MULTILINE)


@cache
def source_of(program: ModuleType) -> bytes:
    """Text of a program: its own, after that of the modules that it imports, without what those do as programs of their own."""
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None  # noqa: S101 (it was imported)
        text = Path(spec.origin).read_text(encoding="utf-8")
        for shared in _SHARED.findall(text):
            if shared not in texts:
                add(shared)
        own = text if name == program.__name__ else _MAIN.sub("", text)
        texts[name] = _SHARED.sub("", own).replace(_FUTURE, "")

    add(program.__name__)
    return "\n".join([_FUTURE, *texts.values()]).encode()
