"""Outcome of a stop that was asked for: by the operator, a drained node or a deleted pod."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_spec.choices import Choice


class Save(Choice):
    """Fate of the work until the stop."""

    SAVED = "Saved"
    NOT_SAVED = "NotSaved"
    NOTHING_TO_SAVE = "NothingToSave"  # no step was done since the newest commit
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class StopReport:
    """The end of the newest stop."""

    attempt: int
    time: str
    """Time from which no rank ran any more, RFC 3339."""
    save: Save
    message: str
    step: int | None = None
    """The newest commit."""
    lost_steps: int | None = None
    """Steps done since; null: not known."""
