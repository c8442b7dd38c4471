"""The chain of commits that a reader may choose from (pure).

An attempt durably records the commit it starts from before it writes any. Readers walk those records backwards; so a late
commit of a frozen rank of an older attempt, which later attempts did not start from, is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep_train.base.errors import ConfigError
from lockstep_train.checkpoint.format.layout import CommitName, parse_commit


@dataclass(frozen=True)
class Claim:
    """The attempt that wants to start."""

    given: int | None
    """The attempt's number from the coordinator, or None for a run by hand."""
    job_uid: str | None


@dataclass(frozen=True)
class Record:
    """The start of one attempt."""

    attempt: int
    """Number in this folder: above every one before it."""
    given: int | None = None
    """The attempt's number from the coordinator, as in its Claim."""
    job_uid: str | None = None
    start: str | None = None
    """Name of the commit in this folder, the path of one elsewhere, or None for a fresh start."""


def candidates(commits: Iterable[CommitName], records: Iterable[Record]) -> list[CommitName]:
    """Commits on the chain of the newest attempt, newest first."""
    found = set(commits)
    by_attempt = {record.attempt: record for record in records}
    order: list[CommitName] = []
    attempt, limit = max(by_attempt, default=None), None
    while attempt is not None:
        own = [commit for commit in found if commit.attempt == attempt and (limit is None or commit.step <= limit)]
        order += sorted(own, key=lambda commit: commit.step, reverse=True)
        record = by_attempt.get(attempt)
        start = parse_commit(record.start) if record and record.start else None
        # An attempt can only have started from an older one; anything else would be a forged or damaged record.
        attempt, limit = (start.attempt, start.step) if start and start.attempt < attempt else (None, None)
    return order


def next_attempt(records: Iterable[Record], claim: Claim, used: Iterable[int] = ()) -> int:
    """This attempt's number in the folder, above every record's and every one in `used` (those of commits and of damaged records).

    Raises ConfigError for an attempt of this job that is not newer than one that already ran."""
    known = list(records)
    if claim.given is not None and claim.job_uid is not None:
        seen = max((record.given or 0 for record in known if record.job_uid == claim.job_uid), default=0)
        if claim.given <= seen:
            raise ConfigError(
                f"attempt {claim.given} of this job is not newer than attempt {seen}, which already ran here; a newer attempt must be the one to go on"
            )
    return max(claim.given or 1, 1 + max([*(record.attempt for record in known), *used], default=0))


def follows_chain(records: Iterable[Record], resume_from: str, claim: Claim) -> bool:
    """Return True if the run goes on from this folder's chain: always with `Auto`; with `None` or a path only after the job's first attempt."""
    return resume_from == "Auto" or (claim.job_uid is not None and any(record.job_uid == claim.job_uid for record in records))
