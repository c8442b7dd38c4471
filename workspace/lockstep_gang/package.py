"""`python3 -m lockstep_gang.package OUT`: the agent as one file that runs wherever Python 3.10 or newer is.

Same sources, same bytes: sorted names, one fixed time, no compression that could differ between machines.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

_SHEBANG = b"#!/usr/bin/env python3\n"
_MAIN = b"""import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
from lockstep_gang.agent.main import main

raise SystemExit(main())
"""
# The kernel keeps SIGTERM from a container's first process until it has a handler: without one, a pod that is told to go while its
# agent is still being imported would hold its node for the whole grace. Nothing was started by then, so there is nothing to save.
_TIME = (1980, 1, 1, 0, 0, 0)  # the first one a zip file can hold


def write_zipapp(out: Path) -> None:
    """Write the executable file; never half of it under its name. Raises OSError."""
    draft = out.with_name(f"{out.name}.draft")
    with draft.open("wb") as file:
        file.write(_SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, content in [("__main__.py", _MAIN), *_sources()]:
                entry = zipfile.ZipInfo(name, _TIME)
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, content)
    draft.chmod(0o755)
    draft.replace(out)


def _sources() -> list[tuple[str, bytes]]:
    root = Path(__file__).parent
    files = sorted(path for path in root.rglob("*.py") if path.name != Path(__file__).name)
    return [(path.relative_to(root.parent).as_posix(), path.read_bytes()) for path in files]


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python3 -m lockstep_gang.package OUT", file=sys.stderr)
        return 2
    write_zipapp(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
