"""A dev environment: a job whose nodes wait for what a person runs on all of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import Model, Rule

IDLE_SECONDS = 8 * 3600
WARN_BEFORE_SECONDS = 1800
LONGEST_SECONDS = 366 * 86400


class JobType(StrEnum):
    """Batch: one run from start to end. Interactive: a dev environment, whose nodes run what they are asked to (`lockstep run --job`)."""

    BATCH = "Batch"
    INTERACTIVE = "Interactive"


def _warns_before(interactive: Interactive) -> bool:
    warn = interactive.warn_seconds
    return warn is None or not interactive.idle_seconds or warn < interactive.idle_seconds


class Interactive(Model):
    """When an environment that nobody uses gives its GPUs back."""

    idle_seconds: Annotated[int, Field(ge=0, le=LONGEST_SECONDS)] = IDLE_SECONDS
    """The job is suspended so long after the last run ended and the last shell was used; 0: never. docs/how-to/dev-environment.md says what counts as use."""
    warn_seconds: Annotated[int | None, Field(ge=1, le=LONGEST_SECONDS)] = None
    """An event and a line in the log say so this long after the last use. Default: half an hour before idleSeconds, or half of it."""

    resume: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Raise it to bring an environment back whose GPUs were released: `lockstep resume` does."""

    RULES = (
        Rule("self.resume >= oldSelf.resume", "resume may only be raised", holds=None, field="resume"),
        Rule(
            "!has(self.warnSeconds) || self.idleSeconds == 0 || self.warnSeconds < self.idleSeconds",
            "warnSeconds must be less than idleSeconds",
            _warns_before,
            field="warnSeconds",
        ),
    )

    @property
    def warns_after_seconds(self) -> int:
        """As written, or the default."""
        return self.warn_seconds or max(self.idle_seconds - WARN_BEFORE_SECONDS, self.idle_seconds // 2)
