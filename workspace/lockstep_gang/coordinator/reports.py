"""Reports of a job: to the operator where one takes them, else into a file of the run's folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lockstep_gang.contract.reply import Reply
from lockstep_gang.contract.report import Report, report_file_text
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.contract.trouble import Trouble
from lockstep_gang.coordinator.records import Records
from lockstep_gang.coordinator.reporter import Reporter
from lockstep_gang.coordinator.waits import happens_within, in_thread
from lockstep_gang.lifecycle.gang import Gang, Phase
from lockstep_gang.lifecycle.preflight.rounds import ends_with_it
from lockstep_gang.lifecycle.summary import message_facts, message_of, state_of, summarize
from lockstep_spec.codec import ContractError
from lockstep_spec.files import why_unwritten

PERIOD_SECONDS = 5.0
NEWS_SECONDS = 1.0
"""Least time between two writes of which none is a transition."""


class ReportFile:
    """Keeps `gang/report.json` of the run's folder: transitions at once, else every 5 s. Training never waits for it.

    Everybody who may read the folder can see how the job does.
    """

    trouble: Trouble | None = None
    """No report is ever refused."""

    def __init__(self, records: Records, say: Callable[[str], None]) -> None:
        self._records = records
        self._say = say
        self._sequence = time.time_ns()
        self._latest: Callable[[], Report] | None = None
        self._written_at, self._due_at = 0.0, 0.0
        self._wake, self._done = asyncio.Event(), asyncio.Event()
        self._has_trouble = False

    def transition(self, report: Report) -> None:
        self._offer(lambda: report, 0.0)

    def news(self, make: Callable[[], Report]) -> None:
        self._offer(make, self._written_at + NEWS_SECONDS)

    def refresh(self, make: Callable[[], Report]) -> None:
        self._latest = make

    def ask(self, often: bool) -> None:
        """Ask nobody: a file doesn't answer."""

    async def flush(self, seconds: float) -> None:
        if self._latest is not None:
            self._offer(self._latest, 0.0)
            await happens_within(self._done, seconds)

    async def run(self) -> None:
        while True:
            await happens_within(self._wake, None if self._latest is None else max(0.0, self._due_at - time.monotonic()))
            self._wake.clear()
            if self._latest is not None and time.monotonic() >= self._due_at:
                await self._write(self._latest())

    def _offer(self, make: Callable[[], Report], due_at: float) -> None:
        self._latest, self._due_at = make, min(self._due_at, due_at)
        self._done.clear()
        self._wake.set()

    async def _write(self, report: Report) -> None:
        self._sequence += 1
        self._written_at = time.monotonic()
        self._due_at = self._written_at + PERIOD_SECONDS
        text = report_file_text(replace(report, sequence=self._sequence, log=()), stamp(time.time()))
        try:
            await in_thread(partial(self._records.write_report, text), "report")
        except (ContractError, OSError) as error:
            if not self._has_trouble:
                why = why_unwritten(error, self._records.report_path) if isinstance(error, OSError) else error
                self._say(f"cannot write {self._records.report_path} ({why}): the job goes on, but commands can't see how it does")
            self._has_trouble = True
        else:
            self._has_trouble = False
        if not self._wake.is_set():
            self._done.set()


Reports = Reporter | ReportFile
"""A place that reports go to."""


def reports_of(run: Run, key: bytes, records: Records, take: Callable[[Reply], None], say: Callable[[str], None]) -> Reports | None:
    """The place for this run's reports. None: a preflight alone leaves the job's folder as it is. `take` gets an operator's replies."""
    if run.report is not None:
        return Reporter(run.report, key, take, say)
    return None if ends_with_it(run) else ReportFile(records, say)


def report_change(reports: Reports, before: Gang, after: Gang, run: Run, tail: Callable[[], tuple[str, ...]]) -> None:
    """Report a change. `tail` returns the last lines of node 0's log, which go with a turn. A report looks at every rank: but for turns it
    is made when it is sent.
    """
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
