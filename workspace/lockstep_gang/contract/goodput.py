"""Uses of a job's time since the first start of its coordinator: in the volume's records and in every report."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep_spec.choices import Choice


class Spent(Choice):
    """Every moment is of exactly one kind, so that the kinds add up to the time that has passed."""

    QUEUED = "queued"  # waiting for nodes, with no failure to blame
    PREFLIGHT = "preflight"  # checks before an attempt
    LOAD = "load"  # from the start of the ranks to their first step
    UNKNOWN = "unknown"  # ranks of a script run that has told no step: with its first one this turns out to have been LOAD
    TRAIN = "train"  # steps that were never done before
    EVALUATE = "evaluate"
    SAVE = "save"  # steps wait for a save, or the results are written
    LOST = "lost"  # steps that a failure undid, done again
    DOWN = "down"  # from the last step before a failure to the next step
    STOPPED = "stopped"  # from a stop that was asked for to the next start


@dataclass(frozen=True)
class Loss:
    """Cost of the failures of one cause: time down and time of steps done again, and the same times the job's GPUs."""

    milliseconds: int = 0
    gpu_milliseconds: int = 0


@dataclass(frozen=True)
class Goodput:
    """Milliseconds by kind; together they are `until` - `began`."""

    began: int = 0
    """Start of the job's first coordinator, milliseconds since 1970; 0: nothing is accounted yet."""
    until: int = 0
    """Accounted up to here."""
    spent: dict[str, int] = field(default_factory=dict)
    """Milliseconds by the values of `Spent`."""
    causes: dict[str, Loss] = field(default_factory=dict)
    """Losses by the values of `Cause`."""
    furthest_step: int = 0
    """The largest step ever reported: smaller ones are done again."""
