"""The account of what a job's time is spent on, and its newest commit, kept on node 0's volume. Nothing here ever stops a job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.records import GoodputRecord, Records
from lockstep_gang.lifecycle.gang import Gang
from lockstep_gang.lifecycle.goodput import absent, accounted
from lockstep_gang.lifecycle.preflight.preflight import ends_with_it
from lockstep_spec.codec import ContractError

ACCOUNT_SECONDS = 15.0
"""At most so much of what an ended coordinator knew is booked as absence by the next one."""


class Account:
    """Reads and writes gang/goodput.json; what stands in the way is said once."""

    def __init__(self, records: Records, run: Run, say: Callable[[str], None]) -> None:
        self._records = records
        self._run = run
        self._say = say
        self._found: GoodputRecord | None = None
        self._kept: GoodputRecord | None = None
        self._trouble = False
        self._writing = threading.Lock()

    def found(self) -> GoodputRecord:
        """What coordinators before this one have left."""
        if self._found is None:
            try:
                self._found = self._records.goodput(self._run.job.uid)
            except (ContractError, OSError, UnicodeDecodeError) as error:
                self._say(f"the account of the job's time begins anew: {error}")
                self._found = GoodputRecord(self._run.job.uid)
        return self._found

    def opened(self, gang: Gang, now: float) -> Gang:
        """The gang of a coordinator that begins, with the account of those before it."""
        return accounted(absent(replace(gang, goodput=self.found().goodput), self._run, now), self._run, now)

    def keep(self, gang: Gang) -> None:
        """Write it down, if it has changed, and nobody is at it: a volume that hangs must hold up one thread, not the gang. Any thread."""
        if ends_with_it(self._run):
            return  # the account on the volume is that of the job itself
        record = GoodputRecord(self._run.job.uid, gang.goodput, gang.checkpoint)
        if record != self._kept and self._writing.acquire(blocking=False):
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
            self._kept, self._trouble = record, False
