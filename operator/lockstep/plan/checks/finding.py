"""One thing that lint found: what, where in the file, and how to mend it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.plan.cluster.seen import Verdict


@dataclass(frozen=True)
class Finding:
    """What was found at one key of the file."""

    key: str
    """As the file writes it, for example network.rdma.rails[1].network."""
    verdict: Verdict
    said: str
    fix: str = ""
    """What to do, as a sentence or a command."""


def failed(key: str, said: str, fix: str) -> Finding:
    return Finding(key, Verdict.FAILED, said, fix)


def warning(key: str, said: str, fix: str) -> Finding:
    return Finding(key, Verdict.WARNING, said, fix)


def unknown(key: str, said: str) -> Finding:
    return Finding(key, Verdict.UNKNOWN, said)


def fine(key: str, said: str) -> Finding:
    return Finding(key, Verdict.OK, said)


def line_of(key: str, lines: Mapping[str, int]) -> int:
    """The line of the key, or of the nearest section around it that the file has."""
    place = key
    while place not in lines and place:
        place = place[: max(place.rfind("."), place.rfind("["), 0)]
    return lines.get(place, 1)
