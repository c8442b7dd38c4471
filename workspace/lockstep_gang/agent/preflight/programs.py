"""Processes of the job's own Python, which has torch: started beside the agent, read to their end, killed. They answer in lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lockstep_gang
from lockstep_gang.agent.ranks.environment import inherited
from lockstep_gang.agent.ranks.processes import send_to_group, start_process
from lockstep_gang.contract.run import Run

_SOURCES = str(Path(lockstep_gang.__file__).parent.parent)
"""A folder, or the zipapp."""
_OUTPUT_BYTES_MAX = 64 * 1024
KILLED_SECONDS = 5.0
"""Time within which the output of killed processes ends."""


class Programs:
    """Processes of one command. `folder`: where they run; not the run's folder with `-m`, which would look for modules there first."""

    def __init__(self, command: Sequence[str], folder: str = "") -> None:
        self._command, self._folder = command, folder or tempfile.gettempdir()
        self._pids: dict[int, int] = {}
        """Process by pipe. One whose pipe has ended is gone from here: its number may be another process's."""

    async def run(self, text: bytearray, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        """Start one, and put what it writes into `text`, of which the last 64 KiB stay, until it has ended.

        One that hangs in a driver outlives its kill, so this may never return: whoever gives up waiting has the text so far.
        """
        read_end, write_end = os.pipe()
        try:
            self._pids[read_end] = start_process([*self._command, *arguments], self._folder, environment, write_end)
        except OSError as error:
            os.close(read_end)
            text += json.dumps({"error": f"{error.strerror}: {self._command[0]}"}).encode()
            return
        finally:
            os.close(write_end)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read_end, "rb", 0))
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    text += data
                    del text[:-_OUTPUT_BYTES_MAX]
        finally:
            self._pids.pop(read_end, None)
            transport.close()

    def kill(self) -> None:
        for pid in self._pids.values():
            send_to_group(pid, signal.SIGKILL)


def of_module(module: str) -> Programs:
    """Processes that run one module of Lockstep's, in the agent's own Python."""
    return Programs([sys.executable, "-m", module])


def program_environment(run: Run, place: Mapping[str, object]) -> dict[str, str]:
    """The variables of ranks, over them `place`, and the way to this package."""
    base = {**inherited(), **run.environment}
    path = os.pathsep.join(filter(None, [_SOURCES, base.get("PYTHONPATH", "")]))
    return {**base, **{name: str(value) for name, value in place.items()}, "PYTHONPATH": path}


def json_objects(text: bytes) -> list[dict[str, Any]]:
    """Lines of JSON in a process's output; what libraries print in between is left out."""
    values: list[dict[str, Any]] = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            values += [value] if isinstance(value, dict) else []
    return values or [{}]


def why_ended(text: bytes, stage: str) -> str:
    """Reason of a process that ended without its result: its own word, or its last line."""
    last = text.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
    error = next((line["error"] for line in reversed(json_objects(text)) if "error" in line), None)
    return str(error or f"ended in {stage}: {last[0]}")[:500]
