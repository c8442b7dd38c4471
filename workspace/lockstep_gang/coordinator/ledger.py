"""The durable records of a job, and the account of its time. Every method may take as long as the volume does: call it in a thread, one at
a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.coordinator.records import GoodputRecord, Records
from lockstep_gang.lifecycle.decide import Decision
from lockstep_gang.lifecycle.gang import Gang
from lockstep_gang.lifecycle.goodput import accounted, with_absence
from lockstep_gang.lifecycle.history import AttemptRecord, begun_records, closed_records, corrected_records, end_record, resume_gang
from lockstep_gang.lifecycle.preflight.rounds import ends_with_it
from lockstep_spec.codec import ContractError
from lockstep_spec.files import why_unwritten

ACCOUNT_SECONDS = 15.0
"""Longest time between two writes, and so of what an ended coordinator knew that the next one books as absence."""


class GoodputAccount:
    """The account of what a job's time is spent on, and its newest commit, in gang/goodput.json. It never stops a job, and reports trouble
    once.
    """

    def __init__(self, records: Records, run: Run, say: Callable[[str], None]) -> None:
        self._records = records
        self._run = run
        self._say = say
        self._earlier: GoodputRecord | None = None
        self._written: GoodputRecord | None = None
        self._trouble = False
        self._writing = threading.Lock()

    def earlier(self) -> GoodputRecord:
        """Account that earlier coordinators have left."""
        if self._earlier is None:
            try:
                self._earlier = self._records.goodput(self._run.job.uid)
            except (ContractError, OSError, UnicodeDecodeError) as error:
                self._say(f"the account of the job's time begins anew: {error}")
                self._earlier = GoodputRecord(self._run.job.uid)
        return self._earlier

    def opened(self, gang: Gang, now: float) -> Gang:
        """Gang of a coordinator that begins, with the account of those before it."""
        return accounted(with_absence(replace(gang, goodput=self.earlier().goodput), self._run, now), self._run, now)

    def keep(self, gang: Gang) -> None:
        """Write the account if it has changed and nobody else writes it: a volume that hangs must hold up one thread, not the gang. Any
        thread.
        """
        if ends_with_it(self._run):
            return  # the account on the volume is that of the job itself
        record = GoodputRecord(self._run.job.uid, gang.goodput, gang.checkpoint)
        if record != self._written and self._writing.acquire(blocking=False):
            try:
                self._write(record)
            finally:
                self._writing.release()

    def _write(self, record: GoodputRecord) -> None:
        try:
            self._records.write_goodput(record)
        except (ContractError, OSError) as error:
            if not self._trouble:
                why = error.strerror if isinstance(error, OSError) else error
                self._say(f"cannot write down what the job's time was spent on ({why}); the job goes on")
            self._trouble = True
        else:
            self._written, self._trouble = record, False


class Ledger:
    """Durable records of the job's attempts and end. Raises ContractError and OSError when the volume's records can't be read."""

    def __init__(self, records: Records, run: Run, say: Callable[[str], None]) -> None:
        self._records = records
        self._folder = f"{run.run_dir}/gang"
        self.account = GoodputAccount(records, run, say)
        self._attempts = records.attempts()

    def opened(self, run: Run, now: float) -> Gang:
        """Gang of a coordinator that begins, with the account of those before it."""
        left = self.account.earlier()
        gang = resume_gang(run, self._attempts, self._records.end(), now, left.checkpoint, left.goodput.until / 1000)
        return self.account.opened(gang, now)

    def write(self, decision: Decision, run: Run, now: float) -> None:
        """Write all that must be durable before the decision's orders are sent. Raises ContractError and OSError."""
        if decision.begin:
            self._write_attempts(begun_records(self._attempts, decision.gang, run, stamp(now)))
        if decision.end:
            self._records.write_end(end_record(decision.gang, run, stamp(now)))
        if decision.close is not None:
            self.close(decision.close, decision.gang)
        self.account.keep(decision.gang)

    def close(self, outcome: str, gang: Gang) -> None:
        self._write_attempts(closed_records(self._attempts, outcome, gang))

    def correct(self, gang: Gang) -> None:
        """Record that a failure turned out to be the cluster's doing."""
        self._write_attempts(corrected_records(self._attempts, gang))

    def _write_attempts(self, attempts: list[AttemptRecord]) -> None:
        self._records.write_attempts(attempts)
        self._attempts = attempts

    def trouble(self, error: ContractError | OSError) -> str:
        """Sentence about a write that failed."""
        why = why_unwritten(error, Path(self._folder)) if isinstance(error, OSError) else error
        return f"cannot write the job's record under {self._folder} ({why})"

    def silence(self, seconds: float) -> str:
        """Sentence about a write that takes so long."""
        return (
            f"the volume with {self._folder} doesn't answer: the job's record was not written within {seconds:.0f} s,"
            " and nothing starts or ends before it is"
        )
