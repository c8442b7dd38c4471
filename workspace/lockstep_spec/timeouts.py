"""Times that the gang waits: for a start to be complete, and for a rank to move."""

from __future__ import annotations

from dataclasses import dataclass

STEP_SECONDS = 3600


@dataclass(frozen=True)
class Timeouts:
    """Limits in seconds. A rank that tells its own limits, as Lockstep's trainer does, is judged by those."""

    start_seconds: int = 1800
    """Until every node is here, and then until every rank has been heard. An image of 20 GB at 20 MB/s takes 17 minutes."""
    step_seconds: int | None = None
    """None: an hour. Lockstep's trainer then goes by the steps that it has measured (base/limits.py)."""
    evaluate_seconds: int = 7200
    save_seconds: int = 3600
    load_seconds: int = 14400
    export_seconds: int = 14400
    collective_seconds: int = 600
    """Until the other ranks of Lockstep's trainer join a collective operation."""
    return_seconds: int | None = None
    """Until a node that was here before is here again, such as a laptop that sleeps for a night. If it is set, every node is waited for
    within a limit. Null: as long as for its first start, and without an operator for as long as it takes.
    """

    def of_activity(self, activity: str) -> int:
        """An activity that isn't known counts as a step."""
        limits = {
            "Init": self.load_seconds,
            "Fetch": self.load_seconds,
            "Load": self.load_seconds,
            "Evaluate": self.evaluate_seconds,
            "Save": self.save_seconds,
            "Export": self.export_seconds,
        }
        return limits.get(activity, self.step_seconds or STEP_SECONDS)
