"""Where a dev environment stands: what was asked to run on all nodes, and since when nobody uses it (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_gang.contract.interactive import Asked, Ended, Found, Idleness


@dataclass(frozen=True)
class Request:
    """What somebody wants to run, from the moment they ask until it has ended."""

    asked: Asked
    node: int
    """Where they are."""
    instance: str
    """Of the agent there: another one has lost them."""
    since: float
    interrupts: int = 0
    why: str = ""
    """Of the first interrupt."""
    looked_at: float = 0.0
    """When nodes were asked for the script; 0: not yet."""
    found: tuple[tuple[int, Found], ...] = ()
    started: bool = False


@dataclass(frozen=True)
class Session:
    """Of a job that is no dev environment it stays as it is here."""

    request: Request | None = None
    last: Ended | None = None
    """Of the newest run: somebody whose connection was away asks again."""
    answers: tuple[tuple[int, Ended], ...] = ()
    """(node, what is to be said there), sent with the next orders."""
    checked: tuple[str, ...] = ()
    """The agents, by instance, that passed the preflight."""
    used_at: float = 0.0
    idleness: Idleness = Idleness.NONE
