"""This node's self-test: begun with the agent, so that the import of torch runs beside whatever the start waits for, and asked for at the preflight."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from lockstep_gang.agent.preflight.programs import KILLED_SECONDS, json_objects, of_module, program_environment, why_ended
from lockstep_gang.contract.preflight import DeviceResult, SelfTestResult
from lockstep_gang.contract.run import Run
from lockstep_spec.codec import ContractError, from_json

PROGRAM_MODULE = "lockstep_gang.agent.preflight.selftest_program"


class NodeSelfTest:
    """Self-test of one node's devices. A result with nothing wrong serves all starts of this agent, until another one is asked for."""

    def __init__(self, run: Run, node: int) -> None:
        self._run, self._node = run, node
        self._programs = of_module(PROGRAM_MODULE)
        self._running: asyncio.Future[None] | None = None
        self._text = bytearray()
        """Output of the process."""
        self._result: SelfTestResult | None = None

    def begin(self) -> None:
        """Start the process, unless it runs or has a result. Nothing where there is no preflight that asks for it."""
        expected = self._run.preflight.self_test if self._run.preflight is not None else None
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
