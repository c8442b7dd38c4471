"""This node's processes of the short all-reduce: started, read, and ended by a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import lockstep_gang
from lockstep_gang.agent.ranks.environment import inherited
from lockstep_gang.agent.ranks.processes import send_to_group, start_process
from lockstep_gang.contract.layout import RankLayout
from lockstep_gang.contract.preflight import Group, Measured
from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.network import any_free_port

RANK_MODULE = "lockstep_gang.agent.preflight.allreduce_rank"
_SOURCES = str(Path(lockstep_gang.__file__).parent.parent)
"""A folder, or the zipapp."""
_OUTPUT_BYTES_MAX = 64 * 1024
KILLED_SECONDS = 5.0


class AllReduceRanks:
    """Processes of the all-reduce, one a GPU or a single one. They report in lines of JSON; the last one has the figure."""

    def __init__(self, run: Run, node: int, group: Group) -> None:
        self._run, self._node, self._group = run, node, group
        self._pids: dict[int, int] = {}
        """Process by pipe. One whose pipe has ended is gone from here: its number may be another process's."""

    async def measure(self) -> Measured:
        """The figure of this node's first process, or why there is none; at the latest when the group's time is over."""
        layout = self._layout
        ranks = layout.counts[self._group.nodes.index(self._node)]
        outputs = [asyncio.ensure_future(self._output(local)) for local in range(ranks)]
        done, _ = await asyncio.wait(outputs, timeout=self._group.seconds)
        self.kill()
        ended, _ = await asyncio.wait(outputs, timeout=KILLED_SECONDS)
        texts = [output.result() if output in ended else b"" for output in outputs]
        measured = _first_failure(texts) if len(done) == ranks else _late(texts, self._group.seconds)
        if measured is None:
            figures = _json_objects(texts[0])[-1]
            measured = Measured(figures["microseconds"], layout.world_size, figures["bytes"])
        return Measured(
            measured.microseconds, measured.ranks, measured.bytes, measured.error, any_free_port(self._run.addresses[self._node])
        )

    def kill(self) -> None:
        for pid in self._pids.values():
            send_to_group(pid, signal.SIGKILL)

    async def _output(self, local_rank: int) -> bytes:
        """Everything that the process wrote."""
        read_end, write_end = os.pipe()
        try:
            # Not in the run's folder: `-m` would look for modules there first.
            command = [sys.executable, "-m", RANK_MODULE]
            self._pids[read_end] = start_process(command, tempfile.gettempdir(), self.environment(local_rank), write_end)
        except OSError as error:
            return json.dumps({"error": f"{error.strerror}: {sys.executable}"}).encode()
        finally:
            os.close(write_end)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read_end, "rb", 0))
        text = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                text = (text + data)[-_OUTPUT_BYTES_MAX:]
        self._pids.pop(read_end, None)
        transport.close()
        return text

    @property
    def _layout(self) -> RankLayout:
        """Places of the group's processes: its nodes count from 0."""
        return RankLayout(tuple(max(1, self._run.gpus_of(node)) for node in self._group.nodes))

    def environment(self, local_rank: int) -> dict[str, str]:
        """Variables of one of this node's processes."""
        group = self._group
        own = self._layout.ranks_of(group.nodes.index(self._node))
        place = {
            "RANK": own.start + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self._layout.world_size,
            "LOCAL_WORLD_SIZE": len(own),
            "MASTER_ADDR": self._run.addresses[group.nodes[0]],
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "GPUS_PER_NODE": self._run.gpus_of(self._node),
            "LOCKSTEP_NODE": self._node,
            "LOCKSTEP_SECONDS": group.seconds,
            "OMP_NUM_THREADS": 1,
        }
        base = {**inherited(), **self._run.environment}
        path = os.pathsep.join(filter(None, [_SOURCES, base.get("PYTHONPATH", "")]))
        return {**base, **{name: str(value) for name, value in place.items()}, "PYTHONPATH": path}


def _json_objects(text: bytes) -> list[dict[str, Any]]:
    """Lines of JSON in a process's output; what libraries print in between is left out."""
    values: list[dict[str, Any]] = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            values += [value] if isinstance(value, dict) else []
    return values or [{}]


def _late(texts: list[bytes], seconds: int) -> Measured:
    late = next((line for text in texts if "microseconds" not in (line := _json_objects(text)[-1])), {})
    return Measured(error=f"not done after {seconds} s, in: {late.get('stage', 'start')}")


def _first_failure(texts: list[bytes]) -> Measured | None:
    for text in texts:
        line = _json_objects(text)[-1]
        if "microseconds" not in line:
            last = text.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
            return Measured(error=str(line.get("error") or f"ended in {line.get('stage', 'start')}: {last[0]}")[:500])
    return None
