"""How long a job waits for what may never come."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lockstep.api.model import Model

Seconds = Annotated[int, Field(ge=5, le=604800)]
START_SECONDS = 1800
"""An image of 20 GB at 20 MB/s takes 17 minutes."""


class HangTimeouts(Model):
    """How long a rank of a script may go without a report before all ranks are restarted. Counts from a rank's first reported step on."""

    step_seconds: Seconds = 3600
    """From one reported step to the next report."""
    evaluate_seconds: Seconds = 7200
    """In activity Evaluate."""
    save_seconds: Seconds = 3600
    """In activity Save."""
    load_seconds: Seconds = 14400
    """In activity Init, Fetch or Load."""
    export_seconds: Seconds = 14400
    """In activity Export."""
