"""Signs of life on a volume that any number of machines share: a file that counts up while its writer lives.

A watcher takes the writer for dead when the file has not changed for long on the watcher's own monotonic clock, and opens it anew at each look. So neither
trusts the other's clock, a file's mtime, a lock that a network file system might not pass on, or what that keeps of an open file.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep_spec.files import open_new

_OWN = secrets.token_hex(4)
"""Part of drafts' names: another process may write the same file."""


def write_sign(file: Path, sign: Mapping[str, object], *, new: bool = False) -> None:
    """Replace the file in one go, so that readers and power cuts leave the one before or this one. `new`: create it, of several writers only one.

    Raises OSError, FileExistsError for a `new` one that is there.
    """
    draft = file if new else file.with_name(f".{file.name}.{_OWN}.tmp")
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666) if new else open_new(draft)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(sign))
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


class Signs:
    """The watcher's memory of what files said. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[str, tuple[bytes, float]] = {}  # file → what it said, and since when

    def unchanged_seconds(self, contents: Mapping[str, bytes]) -> dict[str, float]:
        """Seconds for which each of the files that are there has said the same, as far as this watcher has seen."""
        now = self._clock()
        self._since = {
            name: before if (before := self._since.get(name)) and before[0] == content else (content, now)
            for name, content in contents.items()
        }
        return {name: now - since for name, (_, since) in self._since.items()}
