"""Results of short runs, wherever they run: node 0's lines are played."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from golden.plan_cases import job
from lockstep.api.errors import Failed
from lockstep.plan.cluster.pairs import PairsMeasured, Way
from lockstep.platforms.jobs import shortresults
from lockstep.platforms.jobs.shortresults import Hear, Read, Short, ShortEnd, ShortRuns, measured_steps, preflight, sweep
from lockstep_gang.contract.preflight import SWEEP_DONE, SWEEP_POINT
from support.process_place import ProcessPlace

POINT = f"{SWEEP_POINT}{json.dumps({'bytes': 4, 'microseconds': 5, 'ranks': 2})}"


class Played(ShortRuns):
    def __init__(self, lines: Sequence[str], folder: str = "") -> None:
        self._lines, self._folder = lines, folder
        self.heard = 0
        self.kinds: list[Short] = []

    async def run(self, kind: Short, job: Any, hear: Hear, read: Read | None = None) -> ShortEnd:
        self.kinds.append(kind)
        for line in self._lines:
            self.heard += 1
            if hear(line):
                break
        if read is not None:
            await read(ProcessPlace("x-0"), self._folder)
        return ShortEnd(" | ".join(self._lines[-2:]), "TCP", 2)

    async def pairs(self, job: Any, way: Way) -> PairsMeasured:
        raise NotImplementedError


MADE: dict[Short, Callable[[ShortRuns], Coroutine[Any, Any, object]]] = {
    Short.PREFLIGHT: lambda runs: preflight(runs, job()),
    Short.SWEEP: lambda runs: sweep(runs, job(), lambda point: None),
    Short.STEPS: lambda runs: measured_steps(runs, job(), ["tokens"]),
}


@pytest.mark.parametrize("kind", Short)
async def test_without_a_result_the_last_lines_of_node_0_are_told(kind: Short, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(["a", "b", "c"])
    with pytest.raises(Failed, match=r" ended .*; the log of node 0 ends with: b \| c$"):
        await MADE[kind](played)
    assert played.kinds == [kind]


async def test_of_a_sweep_a_thousand_points_are_taken_to_its_last_line() -> None:
    played, shown = Played([*[POINT] * 1500, SWEEP_DONE, "later"]), list[object]()
    found = await sweep(played, job(), shown.append)
    assert len(found.points) == len(shown) == 1000 and (found.transport, found.nodes, played.heard) == ("TCP", 2, 1501)


@pytest.mark.parametrize(
    ("end", "values", "why"),
    [
        ("[lockstep] Complete: all ranks are done", {"1": {"tokens": 5}}, ""),
        ("[lockstep] Failed: rank 0 on node 0 ran out of memory", {}, "rank 0 on node 0 ran out of memory"),
    ],
)
async def test_the_steps_of_a_complete_run_are_read_in_its_folder(
    end: str, values: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(place: object, name: str, *, root: str, values: Sequence[str]) -> dict[str, Any]:
        assert (name, root, values) == ("x", "/runs/.measured-x", ["tokens"])
        return {"1": {"tokens": 5}}

    monkeypatch.setattr(shortresults, "measured", measured)
    steps, problem = await measured_steps(Played(["[rank 0] Complete: its own word", end], "/runs/.measured-x"), job(), ["tokens"])
    assert (steps, problem) == (values, why)
