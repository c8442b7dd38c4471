"""Progress of a rank, by its own reports (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lockstep_gang.contract.messages import Activity, Beat, RankReport, Step


@dataclass(frozen=True, slots=True)
class Progress:
    """Activity of a rank, and since when."""

    activity: str = ""
    place: str = ""
    step: int | None = None
    """Newest step that it has reported; a rank that has reported none is not judged by the run's limits."""
    position: int | None = None
    """Position in its beats; None: it sends none."""
    limit_seconds: int | None = None
    """Limit of its activity, as the rank itself says."""
    since: float = 0.0
    """Time at which it began what it is in, as far as was heard."""
    heard_at: float = 0.0

    @property
    def doing(self) -> str:
        """Words for it: `Step 13, forward of micro-batch 1 of 2`."""
        if self.position is not None:
            return f"{self.activity}, {self.place}" if self.place else self.activity
        if self.step is None:
            return self.activity or "its run (it reports no steps)"
        return f"{self.activity or 'Step'} after step {self.step}"


@dataclass(frozen=True)
class Wait:
    """Wait of a start: for `nodes`, then for `ranks`; empty: for nobody."""

    what: str = ""
    attempt: int = 0
    since: float = 0.0
    unplaced: bool = False
    """True if a node that is waited for may have no room in the cluster: this time isn't the start's."""


@dataclass(frozen=True)
class Hang:
    """A rank that has not ended what it is in within its limit."""

    rank: int
    """Rank whose limit passed first; who is to blame is another question."""
    limit_seconds: int
    suspects: tuple[int, ...] = ()
    """Ranks that the others wait for, by how far each has come; empty: all have come equally far."""
    words: str = ""
    """The rank's own words, when it noticed by itself."""


def progress_after(progress: Progress, report: RankReport, now: float) -> Progress:
    """The progress after a report of the rank. With beats only those count: they say more exactly when something began."""
    if isinstance(report, Beat):
        since = progress.since if report.activity == progress.activity and progress.position is not None else now
        return Progress(report.activity, report.place, progress.step, report.position, report.limit_seconds, since, now)
    step = report.step if isinstance(report, Step) else progress.step
    if progress.position is not None:
        return Progress(progress.activity, progress.place, step, progress.position, progress.limit_seconds, progress.since, now)
    return replace(progress, activity=_activity(progress.activity, report), step=step, since=now, heard_at=now)


def _activity(before: str, report: RankReport) -> str:
    """Activity after a report. After the last step a script exports, uploads or tests what it has, whether it says so or not."""
    if isinstance(report, Activity):
        return report.activity
    if isinstance(report, Step):
        return "Export" if report.total_steps is not None and report.step >= report.total_steps else "Step"
    return before


def shifted(progress: Progress, seconds: float, latest: float = math.inf) -> Progress:
    """The progress with all times so much later, `latest` at most: nobody could have been heard in that time."""
    return replace(progress, since=min(progress.since + seconds, latest), heard_at=min(progress.heard_at + seconds, latest))
