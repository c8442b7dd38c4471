"""How far a rank has come, by its own reports (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep_gang.contract.messages import Activity, Beat, RankReport, Step


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rank is in, and since when."""

    activity: str = ""
    place: str = ""
    step: int | None = None
    """The newest it has reported; a rank that has reported none is not judged by the run's limits."""
    position: int | None = None
    """As in its beats; None: it sends none."""
    limit_seconds: int | None = None
    """Of its activity, as the rank itself says."""
    since: float = 0.0
    """When it began what it is in, as far as was heard."""
    heard_at: float = 0.0

    @property
    def doing(self) -> str:
        """In words: `Step 13, forward of micro-batch 1 of 2`."""
        if self.position is not None:
            return f"{self.activity}, {self.place}" if self.place else self.activity
        if self.step is None:
            return self.activity or "its start"
        return f"{self.activity or 'Step'} after step {self.step}"


@dataclass(frozen=True)
class Wait:
    """Whom a start waits for: `nodes`, then `ranks`; empty: nobody."""

    what: str = ""
    attempt: int = 0
    since: float = 0.0
    unplaced: bool = False
    """A node that is waited for may have no room in the cluster: this time isn't the start's."""


@dataclass(frozen=True)
class Hang:
    """A rank has not ended what it is in within its limit."""

    rank: int
    """Whose limit passed first; who is to blame is another question."""
    limit_seconds: int
    suspects: tuple[int, ...] = ()
    """Ranks that the others wait for, by how far each has come; empty: all have come equally far."""
    said: str = ""
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
    """After the last step a script exports, uploads or tests what it has, whether it says so or not."""
    if isinstance(report, Activity):
        return report.activity
    if isinstance(report, Step):
        return "Export" if report.total_steps is not None and report.step >= report.total_steps else "Step"
    return before


def shifted(progress: Progress, seconds: float) -> Progress:
    """As if everything had been heard so much later: nobody could have been heard in that time."""
    return replace(progress, since=progress.since + seconds, heard_at=progress.heard_at + seconds)
