"""When the loop saves, and what is told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep_train.base.errors import TrainerError
from lockstep_train.report import Reporter

if TYPE_CHECKING:
    from lockstep_train.assemble import Run
    from lockstep_train.checkpoint.save.save import Saved


class SaveReport:
    """Tells how each save ended, at once and from any thread, and counts for the metrics of the next step."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._seconds: float | None = None
        self._failures = 0
        self._skipped = 0

    def __call__(self, saved: Saved) -> None:
        """Only rank 0 knows of every save whether it is committed."""
        self._seconds = saved.seconds
        if saved.committed:
            self._reporter.checkpoint(saved.step, saved.folder, saved.bytes, saved.seconds, stall_seconds=saved.stall_seconds)
        elif saved.problem is not None:
            self._failures += 1
            self._reporter.save_failed(saved.step, saved.problem, saved.seconds)

    def skip(self, step: int, saving: int | None) -> None:
        self._skipped += 1
        line = f"CHECKPOINT step {step} SKIPPED: step {saving} is still being written; the volume is slower than checkpoint.everySteps asks for"
        self._reporter.event("saveSkipped", line=line, step=step, saving=saving)

    @property
    def metrics(self) -> dict[str, float | None]:
        return {"saveSeconds": self._seconds, "saveFailures": self._failures, "savesSkipped": self._skipped}


def save_at_border(run: Run, step: int, *, must: bool, saving: bool) -> None:
    """Start to save `step`; with `must`, wait until it is committed.

    `saving`: some rank was still at the save before when the ranks last met. Then all of them skip this one, rather than
    wait for a volume that can't keep up; but a save that must be waits. Raises TrainerError if that one fails.
    """
    if saving and not must:
        run.save_report.skip(step, run.saver.last_step)
        return
    run.reporter.activity("Save")
    if not must:
        run.saver.start(run.engine, step)
        return
    saved = run.saver.save(run.engine, step)
    if not saved.committed:
        raise TrainerError(f"step {step} could not be saved: {saved.problem}")


@contextlib.contextmanager
def finishing(run: Run) -> Iterator[None]:
    """Wait for the save under way when the run ends well, or in a way that all ranks share; not when this rank alone has failed."""
    try:
        yield
    except TrainerError:
        run.saver.finish()
        raise
    run.saver.finish()
    run.saver.upkeep.close()
