"""What is durable of the job. Every method may take as long as the volume does: call it in a thread, one at a time."""

from __future__ import annotations

from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.coordinator.account import Account
from lockstep_gang.coordinator.records import Records, Replaced
from lockstep_gang.lifecycle.decide import Decision
from lockstep_gang.lifecycle.gang import Gang
from lockstep_gang.lifecycle.history import begun_records, closed_records, corrected_records, end_record, resumed
from lockstep_spec.codec import ContractError


class Ledger:
    """Raises ContractError and OSError when the volume's records can't be read."""

    def __init__(self, records: Records, run: Run, account: Account) -> None:
        self._records = records
        self._folder = f"{run.run_dir}/gang"
        self._account = account
        self._attempts = records.attempts()

    def opened(self, run: Run, now: float) -> Gang:
        """The gang of a coordinator that begins."""
        left = self._account.found()
        gang = resumed(run, self._attempts, self._records.end(), now, left.checkpoint, left.goodput.until / 1000)
        return self._account.opened(gang, now)

    def write(self, decision: Decision, run: Run, now: float) -> None:
        """All that must be durable before the decision's orders are sent. Raises ContractError and OSError."""
        if decision.begin:
            self.begin(decision.gang, run, now)
        if decision.end:
            self._records.write_end(end_record(decision.gang, run, stamp(now)))
        if decision.close is not None:
            self.close(decision.close, decision.gang)
        self._account.keep(decision.gang)

    def begin(self, gang: Gang, run: Run, now: float) -> None:
        attempts = begun_records(self._attempts, gang, run, stamp(now))
        self._records.write_attempts(attempts)
        self._attempts = attempts

    def close(self, outcome: str, gang: Gang) -> None:
        attempts = closed_records(self._attempts, outcome, gang)
        self._records.write_attempts(attempts)
        self._attempts = attempts

    def correct(self, gang: Gang) -> None:
        """A failure turned out to be the cluster's doing."""
        attempts = corrected_records(self._attempts, gang)
        self._records.write_attempts(attempts)
        self._attempts = attempts

    def trouble(self, error: ContractError | OSError) -> str:
        """In a sentence."""
        why = error.strerror if isinstance(error, OSError) else error
        hint = ": is the volume full or read-only?" if isinstance(error, OSError) and not isinstance(error, Replaced) else ""
        return f"cannot write the job's record under {self._folder} ({why}){hint}"

    def silence(self, seconds: float) -> str:
        """In a sentence, when a write takes so long."""
        return (
            f"the volume with {self._folder} doesn't answer: the job's record was not written within {seconds:.0f} s,"
            " and nothing starts or ends before it is"
        )
