"""One thing that was looked at, of a cluster, a cluster file or a job, and what came of it (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """Outcome of one check. A check of a cluster or its file warns or fails; a plan tells whether the job starts."""

    OK = "ok"
    NOTE = "note"  # worth knowing, and in nobody's way
    WARNING = "warning"  # it works, and probably not as meant
    WAITS = "waits"  # the job would start by itself once something is free
    RISK = "risk"  # the job would start, and may fail once it runs
    FAILED = "failed"  # something must be mended before jobs run
    REFUSED = "refused"  # the job can't run until somebody changes something
    UNKNOWN = "unknown"  # not for this person to see, or stated nowhere


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    subject: str
    """Part of the cluster (doctor), key of the cluster file such as network.rdma.rails[1].network (lint), or section of the plan."""
    outcome: Outcome
    message: str
    fix: str = ""
    """Remedy, as a sentence or a command."""
    awaited: str = ""
    """Object of the wait, worded to follow `would wait for`; only with WAITS."""


def failed(subject: str, message: str, fix: str) -> Finding:
    return Finding(subject, Outcome.FAILED, message, fix)


def warning(subject: str, message: str, fix: str) -> Finding:
    return Finding(subject, Outcome.WARNING, message, fix)


def unknown(subject: str, message: str, fix: str = "") -> Finding:
    return Finding(subject, Outcome.UNKNOWN, message, fix)


def fine(subject: str, message: str) -> Finding:
    return Finding(subject, Outcome.OK, message)


def note(subject: str, message: str, fix: str = "") -> Finding:
    return Finding(subject, Outcome.NOTE, message, fix)


def refused(subject: str, message: str, fix: str = "") -> Finding:
    return Finding(subject, Outcome.REFUSED, message, fix)


def waits(subject: str, message: str, fix: str, awaited: str) -> Finding:
    return Finding(subject, Outcome.WAITS, message, fix, awaited)


def line_of(key: str, lines: Mapping[str, int]) -> int:
    """Line of the key, or of the nearest section around it that the file has."""
    place = key
    while place not in lines and place:
        place = place[: max(place.rfind("."), place.rfind("["), 0)]
    return lines.get(place, 1)
