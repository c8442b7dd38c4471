"""status.goodput: what a job's time went into."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lockstep.api.model import Model

Seconds = Annotated[int, Field(ge=0)]


class LossStatus(Model):
    """What the failures of one cause have cost."""

    cause: Annotated[str, Field(max_length=64)]
    """Its kind, as in failure.cause."""
    seconds: Seconds
    """Time down, and time of steps done again."""
    gpu_seconds: Seconds
    """The same, times the GPUs that the job held."""


class GoodputStatus(Model):
    """Seconds since the job was accepted, by what they were spent on. Written with progress, otherwise at most every 5 minutes."""

    percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    """Training and evaluation, in per cent of the time since the pods ran, without the time stopped. Absent until a step was told: a script that tells
    none may train or not, and a run that had nothing left to do has no goodput."""
    queued_seconds: Seconds = 0
    """Waiting for pods and nodes, with no failure to blame."""
    preflight_seconds: Seconds = 0
    """Checks before attempts."""
    load_seconds: Seconds = 0
    """From the start of the ranks to their first step, when no failure came before."""
    train_seconds: Seconds = 0
    """Steps that were not done before."""
    unknown_seconds: Seconds = 0
    """The ranks of a script ran, which has told no step yet."""
    evaluate_seconds: Seconds = 0
    """Evaluations."""
    save_seconds: Seconds = 0
    """Steps waited for a save, or results were written."""
    lost_seconds: Seconds = 0
    """Steps that a failure undid, done again."""
    down_seconds: Seconds = 0
    """From the last step before a failure to the next step."""
    stopped_seconds: Seconds = 0
    """From a stop that was asked for to the next start."""
    losses: Annotated[list[LossStatus], Field(max_length=16)] = []
    """Lost and down, by cause."""
