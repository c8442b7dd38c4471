"""Exchange with whoever asks a host to keep a job: files that come with a request, answers, what can't be done, and writes that are whole
or not at all.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.platforms.onhost.readings import state_folder
from lockstep_spec.files import write_durably

Json = dict[str, Any]
REQUEST_BYTES_MAX = 96 << 20
FILES = ("run.json", "key", "job.json", "agent.pyz")
REMEDIES = {
    errno.ENOSPC: ": make room on its file system",
    errno.EDQUOT: ": make room, or get a larger quota",
    errno.EROFS: ": its file system must be mounted writable, else no job can keep its files there",
    errno.EACCES: ": it must be yours to write",
}


class Declined(Exception):
    """The request can't be done; the message says why."""


def write(path: Path, data: bytes) -> None:
    """Write the whole file or nothing, durably, for this user alone."""
    try:
        write_durably(path, data, 0o600)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # (a write says no path by itself)


def read_request(stream: BinaryIO) -> Json:
    """Read a request, which is one line, with the content of its files by their names. Raises Declined."""
    line = stream.readline(REQUEST_BYTES_MAX)
    if not line.endswith(b"\n"):
        raise Declined(f"the connection ended before all files were here, or they have more than {REQUEST_BYTES_MAX >> 20} MiB")
    request: Json = json.loads(line)
    files = request.get("files", {})
    if others := files.keys() - set(FILES):
        raise Declined(f"{min(others)!r} is no file of a job: they are {', '.join(FILES)}")
    return {**request, "files": {name: base64.b64decode(text) for name, text in files.items()}}


def answer(value: Json) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone; what was asked for is done all the same
        print(json.dumps(value), flush=True)


def problem_of(error: OSError) -> str:
    """Say what can't be read or written, and what helps. A file that is only here for a moment is named by the folder of all jobs."""
    where = str(error.filename or "a file of the job")
    jobs = str(state_folder())
    if where.startswith(f"{jobs}/."):
        where = jobs
    return f"{where}: {error.strerror}{REMEDIES.get(error.errno or 0, '')}"
