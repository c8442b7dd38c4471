"""`python3 -m lockstep_gang.package OUT`: the agent as one file that runs wherever Python 3.10 or newer is.

Same sources, same bytes: sorted names, one fixed time, no compression that could differ between machines. `--sources`: nothing else, so
that it fits into a ConfigMap. Otherwise with what this Python has compiled: an agent that runs with the same version need not do so at
every start.
"""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from lockstep_gang.build import BUILD, build_id, sources
from lockstep_spec.files import durable_file

_SHEBANG = b"#!/usr/bin/env python3\n"
_MAIN = b"""import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
from lockstep_gang.agent.main import main

raise SystemExit(main())
"""
# The kernel keeps SIGTERM from a container's first process until it has a handler: without one, a pod that is deleted while its
# agent is still being imported would hold its node for the whole grace. Nothing was started by then, so there is nothing to save.
_TIME = (1980, 1, 1, 0, 0, 0)  # the first one a zip file can hold
_HEAD_BYTES = 16
_UNCHECKED = (0b01).to_bytes(4, "little")
"""In a compiled file's head: it goes by its source's hash, which nobody need compare."""
Entry = tuple[str, bytes]


def write_zipapp(out: Path, *, compiled: bool = True) -> None:
    """Write the executable file, with compiled files where this Python has them; never half of it under its name. Raises OSError."""
    with durable_file(out, 0o755) as file:
        file.write(_SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, content in [("__main__.py", _MAIN), *_entries(compiled=compiled)]:
                entry = zipfile.ZipInfo(name, _TIME)
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, content)


def _entries(*, compiled: bool) -> Iterator[Entry]:
    yield f"lockstep_gang/{BUILD}", build_id().encode()
    for name, path in sources().items():
        source = path.read_bytes()
        code = compiled_code(path, source) if compiled else b""
        if code:
            yield f"{name}c", code
        yield name, source


def compiled_code(path: Path, source: bytes) -> bytes:
    """Compiled code that this Python keeps of a file, if it is of this very source, for a place where it isn't compared with it any more;
    empty: nothing.

    Another version of Python passes over it, and compiles the source.
    """
    try:
        cached = Path(importlib.util.cache_from_source(path)).read_bytes()
    except (OSError, NotImplementedError):
        return b""
    digest, stat = importlib.util.source_hash(source), path.stat()
    of_hash = bool(cached[4] & 1) if len(cached) > _HEAD_BYTES else False
    stated = digest if of_hash else b"".join((value & 0xFFFFFFFF).to_bytes(4, "little") for value in (int(stat.st_mtime), stat.st_size))
    is_of_it = cached[:4] == importlib.util.MAGIC_NUMBER and cached[8:_HEAD_BYTES] == stated
    return importlib.util.MAGIC_NUMBER + _UNCHECKED + digest + cached[_HEAD_BYTES:] if is_of_it else b""


def main() -> int:
    arguments = sys.argv[1:]
    compiled = "--sources" not in arguments
    paths = [argument for argument in arguments if argument != "--sources"]
    if len(paths) != 1:
        print("usage: python3 -m lockstep_gang.package [--sources] OUT", file=sys.stderr)
        return 2
    write_zipapp(Path(paths[0]), compiled=compiled)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
