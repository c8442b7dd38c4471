"""Times of a drill, as its nodes tell them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.platforms.places import drilledjob
from lockstep.platforms.places.backend import Job
from lockstep.platforms.places.drilledjob import DrilledJob, DrillWatch
from unit.silent_place import SilentPlace, SilentProgram
from unit.virtual_time import VirtualClock

HIT = 100.0


@pytest.mark.parametrize(
    ("node_0", "node_1", "stopped", "started"),
    [
        ({"stopped": 100.25, "started": 104.0}, {"stopped": 100.5, "started": 104.5}, 0.5, 4.0),
        ({"stopped": 100.25, "started": 100.375}, {"stopped": 100.5}, 0.375, 0.375),
        ({"stopped": 100.25}, {"stopped": 100.5}, 0.5, None),
        ({}, {}, None, None),
    ],
    ids=["in order", "the last stop is heard after the start that waited for it", "nothing starts", "nothing stops"],
)
def test_all_have_stopped_no_later_than_the_next_attempt_starts(
    node_0: dict[str, float], node_1: dict[str, float], stopped: float | None, started: float | None
) -> None:
    drilled = DrilledJob(cast(Job, None), cast(Any, {"attempts": 1, "nodes": 2}), 10.0, lambda text: None)
    watch = DrillWatch(drilled, 1)
    watch._hit = HIT
    for node, heard in enumerate((node_0, node_1)):
        watch._streams[node]._heard += [(when, {word: 1}) for word, when in heard.items()]
    assert (watch.stopped_seconds(), watch.first_heard_seconds("started")) == (stopped, started)


def test_what_a_drill_waits_for_is_looked_at_five_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = VirtualClock(), list[float]()
    monkeypatch.setattr(drilledjob, "time", clock)
    drilled = DrilledJob(cast(Job, None), cast(Any, {"attempts": 1, "nodes": 2}), 100.0, lambda text: None)

    def look() -> bool:
        looks.append(clock.now - 1000.0)
        return len(looks) == 4

    assert drilled.until("x", look)
    assert looks == pytest.approx([0, 0.2, 0.4, 0.6])


def test_a_verb_that_answers_without_an_end_is_given_up_after_a_thousand_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def program(*_: object, **__: object) -> AsyncIterator[object]:
        yield SilentProgram(SilentPlace())

    async def lines(_: object) -> AsyncIterator[str]:
        for number in range(5000):
            yield f'{{"answer": {number}}}'

    @asynccontextmanager
    async def volume(*_: object) -> AsyncIterator[object]:
        yield SimpleNamespace(place=SilentPlace(), run_folder=lambda name: "/x")

    monkeypatch.setattr(drilledjob, "python_program", program)
    monkeypatch.setattr(drilledjob, "lines_of", lines)
    job: Any = SimpleNamespace(volume=volume, name="x")
    stream = drilledjob.VerbStream(DrilledJob(job, cast(Any, {"attempts": 1, "nodes": 2}), 10.0, lambda text: None), 0, "watch")
    stream._listen()
    assert "prints more than 1000 answers" in stream.problem and len(stream._heard) == 1000


def test_of_a_large_job_the_node_that_is_hit_and_15_others_are_watched() -> None:
    watch = DrillWatch(DrilledJob(cast(Job, None), cast(Any, {"attempts": 1, "nodes": 20}), 10.0, lambda text: None), 18)
    assert [*watch._streams] == [18, *range(15)] and watch.notes == ["16 of 20 nodes were watched"]
