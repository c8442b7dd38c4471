"""`restart.retry` was raised: a Failed job starts again from its last commit (pure).

The number is frozen into every start, and an end counts for its own number and higher ones only. So whoever raises it needs no further step,
and nothing is lost by an operator that ends in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.api.job import TrainingJob
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.render.objects import Frozen
from lockstep_gang.contract import State


@dataclass(frozen=True)
class Earlier:
    """A start that failed, where no operator keeps a job: who goes on from it has its uid, so that attempts and history are one."""

    uid: str
    retry: int


def retried(job: TrainingJob, earlier: Earlier) -> TrainingJob:
    """The job as it starts again after `earlier`."""
    restart = job.spec.restart.model_copy(update={"retry": max(earlier.retry + 1, job.spec.restart.retry)})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"restart": restart})})


def asked(observed: Observed) -> int:
    return int((observed.job["spec"].get("restart") or {}).get("retry", 0))


def retry_of(running: Frozen) -> int:
    return running.parsed.restart.retry


def is_retried(observed: Observed, running: Frozen | None) -> bool:
    """Whether the failure that status tells is passed over: what it left is at zero, or the next start is there already."""
    told = int(observed.status.get("retry", 0))
    return asked(observed) > told and (observed.at_zero or (running is not None and retry_of(running) >= asked(observed)))


def is_of_an_earlier_retry(observed: Observed, received: ReceivedReport) -> bool:
    """A report of a failure that was there before the retry and may still be in memory."""
    return received.report.state is State.FAILED and received.report.retry < asked(observed)
