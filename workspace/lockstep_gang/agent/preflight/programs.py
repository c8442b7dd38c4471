"""Processes of the job's own Python, which has torch: this node's self-test, and its ranks of the short all-reduce. They answer in lines of
JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lockstep_gang
from lockstep_gang.agent.ranks.environment import inherited
from lockstep_gang.agent.ranks.processes import send_to_group, start_process
from lockstep_gang.contract.layout import RankLayout
from lockstep_gang.contract.preflight import DeviceResult, Group, Measured, SelfTestResult
from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.network import any_free_port
from lockstep_gang.lifecycle.preflight.nodes import expected_of
from lockstep_spec.codec import ContractError, from_json

_SOURCES = str(Path(lockstep_gang.__file__).parent.parent)
"""A folder, or the zipapp."""
RANK_MODULE = "lockstep_gang.agent.preflight.allreduce_rank"
PROGRAM_MODULE = "lockstep_gang.agent.preflight.selftest_program"
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


class NodeSelfTest:
    """Self-test of one node's devices, begun with the agent, so that the import of torch runs beside whatever the start waits for. A result
    with nothing wrong serves all starts of this agent, until another one is asked for.
    """

    def __init__(self, run: Run, node: int) -> None:
        self._run, self._node = run, node
        self._programs = Programs([sys.executable, "-m", PROGRAM_MODULE])
        self._running: asyncio.Future[None] | None = None
        self._text = bytearray()
        """Output of the process."""
        self._result: SelfTestResult | None = None

    def begin(self) -> None:
        """Start the process, unless it runs or has a result. Nothing where there is no preflight that asks for it."""
        expected = expected_of(self._run).self_test
        if expected is None or self._run.interactive is not None or self._running is not None or self._result is not None:
            return
        place = {"GPUS_PER_NODE": self._run.gpus_of(self._node), "LOCKSTEP_NODE": self._node, "OMP_NUM_THREADS": 1}
        arguments = [expected.precision] if expected.precision else []
        self._text = bytearray()
        self._running = asyncio.ensure_future(self._programs.run(self._text, program_environment(self._run, place), arguments))

    async def result(self, seconds: int, *, anew: bool) -> SelfTestResult:
        """The result, or why there is none, at the latest after so long. `anew`: not one of an earlier start."""
        if anew:
            self._result = None
        self.begin()
        if self._result is not None:
            return self._result
        running, text = self._running, self._text
        assert running is not None  # noqa: S101 (begun just now; only a run that expects a self-test is asked for it)
        done, _ = await asyncio.wait([running], timeout=seconds)
        self._programs.kill()
        await asyncio.wait([running], timeout=KILLED_SECONDS)
        self._running = None
        tested = read_result(bytes(text), max(1, self._run.gpus_of(self._node)), None if done else seconds)
        self._result = tested if is_clean(tested) else None
        return tested

    def end(self) -> None:
        """Kill the process: ranks need the devices, and this run no result any more."""
        self._programs.kill()
        self._running = None


def is_clean(tested: SelfTestResult) -> bool:
    return not tested.error and all(not device.error and not device.wrong and not device.lacking for device in tested.devices)


def read_result(text: bytes, devices: int, late_seconds: int | None) -> SelfTestResult:
    """Result in what the process wrote. `late_seconds`: it was killed after so long; None: it has ended by itself."""
    lines = json_objects(text)
    stage = next((line["stage"] for line in reversed(lines) if isinstance(line.get("stage"), str)), "start")
    why = f"not done after {late_seconds} s, in: {stage}" if late_seconds is not None else why_ended(text, stage)
    ecc: dict[str, Any] = next((line["ecc"] for line in lines if isinstance(line.get("ecc"), dict)), {})
    seen = {device.index: device for line in lines if (device := _device(line.get("device"), ecc)) is not None}
    if not seen:
        return SelfTestResult(error=why[:500])
    lost = [DeviceResult(index, error=why[:500]) for index in range(devices) if index not in seen]
    return SelfTestResult((*(seen[index] for index in sorted(seen)), *lost))


def _device(value: Any, ecc: dict[str, Any]) -> DeviceResult | None:
    try:
        device = from_json(DeviceResult, value, "self-test")
    except ContractError:
        return None
    count = ecc.get(device.uuid)
    return replace(device, ecc_errors=count if isinstance(count, int) else None)


class AllReduceRanks:
    """Processes of the all-reduce, one a GPU or a single one. They report in lines of JSON; the last one has the figure."""

    def __init__(self, run: Run, node: int, group: Group) -> None:
        self._run, self._node, self._group = run, node, group
        self._programs = Programs([sys.executable, "-m", RANK_MODULE])

    async def measure(self) -> Measured:
        """The figure of this node's first process, or why there is none; at the latest when the group's time is over."""
        layout = self._layout
        ranks = layout.counts[self._group.nodes.index(self._node)]
        written = [bytearray() for _ in range(ranks)]
        running = [asyncio.ensure_future(self._programs.run(text, self.environment(local))) for local, text in enumerate(written)]
        done, _ = await asyncio.wait(running, timeout=self._group.seconds)
        self.kill()
        await asyncio.wait(running, timeout=KILLED_SECONDS)
        texts = [bytes(text) for text in written]
        port = any_free_port(self._run.addresses[self._node])
        error = why_unmeasured(texts, None if len(done) == ranks else self._group.seconds)
        if error:
            return Measured(error=error, port=port)
        figures = json_objects(texts[0])[-1]
        return Measured(figures["microseconds"], layout.world_size, figures["bytes"], port=port)

    def kill(self) -> None:
        self._programs.kill()

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
        return program_environment(self._run, place)


def why_unmeasured(texts: list[bytes], late_seconds: int | None) -> str:
    """Reason of the first process without a figure; empty: all have one. `late_seconds`: some were killed after so long."""
    text = next((text for text in texts if "microseconds" not in json_objects(text)[-1]), None)
    stage = "start" if text is None else json_objects(text)[-1].get("stage", "start")
    if late_seconds is not None:
        return f"not done after {late_seconds} s, in: {stage}"
    return "" if text is None else why_ended(text, stage)
