"""What `lockstep plan` says of a job before it takes GPUs: lines, each with what came of it, and one verdict over all (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lockstep.api.objects import Object


class Outcome(StrEnum):
    """What one line says of the job."""

    OK = "ok"
    NOTE = "note"  # worth knowing, and in nobody's way
    WAITS = "waits"  # it would start by itself once something is free
    RISK = "risk"  # it would start, and may fail once it runs
    REFUSED = "refused"  # it can't run until somebody changes something
    UNKNOWN = "unknown"  # not for this person to see, or nobody has said


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    section: str
    outcome: Outcome
    said: str
    fix: str = ""
    """What to do, as a sentence or a command."""
    awaited: str = ""
    """Of WAITS: what for, to be said after `would wait for`."""


@dataclass(frozen=True)
class Try:
    """What the API server said to a dry run of creating an object. None of what it says has happened."""

    accepted: bool | None
    """None: it could not be asked."""
    said: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Around:
    """A cluster as one person sees it. None: that person may not read it, or the cluster knows no such kind."""

    namespace: str
    namespace_labels: Mapping[str, str] | None = None
    nodes: tuple[Object, ...] | None = None
    pods: tuple[Object, ...] | None = None
    """Of all namespaces."""
    own_pods: tuple[Object, ...] | None = None
    """Of the job itself, where it runs already."""
    quotas: tuple[Object, ...] | None = None
    ranges: tuple[Object, ...] | None = None
    claims: tuple[Object, ...] | None = None
    classes: tuple[Object, ...] | None = None
    networks: frozenset[str] | None = None
    """NetworkAttachmentDefinitions of the namespace."""
    present: Mapping[tuple[str, str], bool | None] = field(default_factory=dict)
    """(kind, name) of what the pods need to exist → whether it does; None: not known."""
    tries: Mapping[str, Try] = field(default_factory=dict)
    """Kind → what the API server said to it."""
    operator_image: str | None = None
    """Of the operator that works in the namespace; None: there is none, or it may not be seen."""
    profile_differs: tuple[str, ...] = ()
    """Sections in which the TrainingCluster on the cluster is not as the file says."""
    new: frozenset[str] | None = None
    """Kind/name of what would be made; None: not known, so everything is counted as new."""


class Verdict(StrEnum):
    """What all lines come to."""

    FITS = "fits now"
    FITS_AS_SEEN = "fits as far as can be seen"
    WAITS = "would wait"
    MAY_FAIL = "may fail once it runs"
    REFUSED = "refused"


EXIT_CODES = {Verdict.FITS: 0, Verdict.FITS_AS_SEEN: 0, Verdict.REFUSED: 1, Verdict.WAITS: 3, Verdict.MAY_FAIL: 4}


def verdict(lines: Iterable[Line]) -> Verdict:
    """The gravest of what the lines say. A risk is graver than waiting, which ends by itself."""
    lines = list(lines)
    outcomes = {line.outcome for line in lines if line.section in CONCERNS_START}
    if Outcome.REFUSED in outcomes:
        return Verdict.REFUSED
    if any(line.outcome is Outcome.RISK for line in lines):
        return Verdict.MAY_FAIL
    if Outcome.WAITS in outcomes:
        return Verdict.WAITS
    return Verdict.FITS_AS_SEEN if Outcome.UNKNOWN in outcomes else Verdict.FITS


CONCERNS_START = ("image", "cluster", "objects", "nodes", "quota", "claims", "admission", "needs", "memory")
"""Sections that say whether the job can start; the others tell what it will do then."""


def sentence(lines: Sequence[Line]) -> str:
    """The last line of the plan."""
    found = verdict(lines)
    if found is Verdict.REFUSED:
        return f"refused: {'; '.join(line.said for line in lines if line.outcome is Outcome.REFUSED)}"
    awaited = ", and for ".join(dict.fromkeys(line.awaited for line in lines if line.outcome is Outcome.WAITS))
    unknown = list(dict.fromkeys(line.section for line in lines if line.outcome is Outcome.UNKNOWN and line.section in CONCERNS_START))
    not_known = f"; not known: {', '.join(unknown)}" if unknown else ""
    if found is Verdict.MAY_FAIL:
        risks = "; ".join(line.said for line in lines if line.outcome is Outcome.RISK)
        return f"may fail once it runs: {risks}{f'; would wait for {awaited}' if awaited else ''}{not_known}"
    if found is Verdict.WAITS:
        return f"would wait for {awaited}{not_known}"
    return f"fits as far as can be seen{not_known}" if found is Verdict.FITS_AS_SEEN else "fits now"
