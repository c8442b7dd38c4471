"""Reports of a job: to the operator where one takes them, else into a file of the run's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from lockstep_gang.contract.reply import Reply
from lockstep_gang.contract.report import Report
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.trouble import Trouble
from lockstep_gang.coordinator.records import Records
from lockstep_gang.coordinator.report_file import ReportFile
from lockstep_gang.coordinator.reporter import Reporter
from lockstep_gang.lifecycle.gang import Gang, Phase
from lockstep_gang.lifecycle.preflight.rounds import ends_with_it
from lockstep_gang.lifecycle.summary import message_facts, message_of, state_of, summarize


class Reports(Protocol):
    """A place that reports go to."""

    trouble: Trouble | None
    """Reason why no report has ever been taken."""

    def transition(self, report: Report) -> None:
        """Deliver a report at once."""

    def news(self, make: Callable[[], Report]) -> None:
        """Offer a report that is worth delivering soon. It is made when it is delivered."""

    def refresh(self, make: Callable[[], Report]) -> None:
        """Offer a report for the next time that one is due."""

    def ask(self, often: bool) -> None:
        """Report more often while replies are waited for."""

    async def flush(self, seconds: float) -> None:
        """Wait until what counts is delivered, but not longer than this."""

    async def run(self) -> None:
        """Deliver until cancelled."""


def reports_of(run: Run, key: bytes, records: Records, take: Callable[[Reply], None], say: Callable[[str], None]) -> Reports | None:
    """The place for this run's reports. None: a preflight alone leaves the job's folder as it is. `take` gets an operator's replies."""
    if run.report is not None:
        return Reporter(run.report, key, take, say)
    return None if ends_with_it(run) else ReportFile(records, say)


def report_change(reports: Reports, before: Gang, after: Gang, run: Run, tail: Callable[[], tuple[str, ...]]) -> None:
    """Report a change. `tail` returns the last lines of node 0's log, which go with a turn. A report looks at every rank: but for turns it is made when it is sent."""
    if _turns(before) != _turns(after):
        reports.transition(replace(summarize(after, run), log=tail()))
    elif _is_news(before, after, run):
        reports.news(partial(summarize, after, run))
    else:
        reports.refresh(partial(summarize, after, run))


def _is_news(before: Gang, after: Gang, run: Run) -> bool:
    if (before.checkpoint, before.failed_saves) != (after.checkpoint, after.failed_saves):
        return True
    if (before.fabric.verdict, before.stragglers) != (after.fabric.verdict, after.stragglers):
        return True
    if message_facts(before) == message_facts(after):
        return False
    return after.phase is Phase.ACTIVE or message_of(before, run) != message_of(after, run)


def _turns(gang: Gang) -> tuple[object, ...]:
    """Changes of these are reported at once."""
    return state_of(gang), gang.attempt, gang.stopped, gang.session.idleness, gang.unwritten, gang.untold, gang.awaited
