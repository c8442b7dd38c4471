"""Time limits of the parts of a run (pure), and those who hear of them. Generous: a limit that fires in a healthy run costs the run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

STEP_FLOOR_SECONDS = 120.0
MEDIANS = 3.0
FIRST_STEP_SECONDS = 1800.0
"""Limit of the first step and of the evaluation before it: communicators are made, kernels are chosen and pages are read the first time."""
LOAD_SECONDS = 4 * 3600.0
"""Data and model, from a slow volume or from the hub. Begun anew whenever whoever prepares the data says how far it is."""
SAVE_SECONDS = 1800.0
EXPORT_SECONDS = 3600.0
END_SECONDS = 300.0


def step_seconds(configured: int | None, durations: Sequence[float]) -> float:
    """Limit of one step or one batch of an evaluation. `durations`: seconds of the last steps, of which 3 medians are allowed unless a
    limit is configured; a first step has none.
    """
    if configured is not None:
        return float(configured)
    return max(STEP_FLOOR_SECONDS, MEDIANS * statistics.median(durations)) if durations else FIRST_STEP_SECONDS


Say = Callable[[str], None]
"""Function that prints a line for people."""


class Watch:
    """Listener to what a run is doing. This one does nothing: it is for those who run a part of a run."""

    def begin(self, activity: str, limit_seconds: float) -> None:
        """Start an activity that must end, or be begun anew, within the limit."""

    def at(self, place: str) -> None:
        """Note a place within the activity; the limit runs on."""

    def loaded(self) -> None:
        """Leave SIGTERM to the main thread from here on: there is a state to save."""


UNWATCHED = Watch()
