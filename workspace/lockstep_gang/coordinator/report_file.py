"""The newest report as a file on node 0's volume, where no operator takes it: everybody who may read the run's folder can see how the job does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lockstep_gang.contract.report import Report, report_file_text
from lockstep_gang.contract.times import stamp
from lockstep_gang.contract.trouble import Trouble
from lockstep_gang.coordinator.records import Records
from lockstep_gang.coordinator.waits import happens_within, in_thread
from lockstep_spec.codec import ContractError
from lockstep_spec.files import why_unwritten

PERIOD_SECONDS = 5.0
NEWS_SECONDS = 1.0
"""Least time between two writes of which none is a transition."""


class ReportFile:
    """Keeps `gang/report.json` of the run's folder: transitions at once, else every 5 s. Training never waits for it."""

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
        """Offer a report that is worth writing soon."""
        self._offer(make, self._written_at + NEWS_SECONDS)

    def refresh(self, make: Callable[[], Report]) -> None:
        """Offer a report for the next time that one is due."""
        self._latest = make

    def ask(self, often: bool) -> None:
        """Ask nobody: a file doesn't answer."""

    async def flush(self, seconds: float) -> None:
        """Wait until the newest report is written, but not longer than this."""
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
