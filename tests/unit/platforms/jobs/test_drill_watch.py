"""Times of a drill, as its nodes tell them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lockstep.platforms.jobs.drilledjob import DrilledJob, DrillWatch, Job

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
    drilled = DrilledJob(cast(Job, None), None, cast(Any, {"attempts": 1, "nodes": 2}), 10.0, lambda text: None)
    watch = DrillWatch(drilled, 1)
    watch._hit = HIT
    for node, heard in enumerate((node_0, node_1)):
        watch._streams[node]._heard += [(when, {word: 1}) for word, when in heard.items()]
    assert (watch.stopped_seconds(), watch.first_heard_seconds("started")) == (stopped, started)
