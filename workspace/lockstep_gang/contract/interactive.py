"""A dev environment: what somebody asks to be run on all nodes, and what they hear of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from lockstep_spec.choices import Choice

RUN_TEXT = 256
"""Characters of what runs, and of who asked for it, in a report."""


@dataclass(frozen=True)
class Interactive:
    """The part of run.json that says when nobody uses the environment any more: seconds since its last use; 0: never."""

    idle_seconds: int = 0
    warn_seconds: int = 0


class Idleness(Choice):
    NONE = "None"  # it is in use, or was a short while ago
    WARNED = "Warned"
    OVER = "Over"  # its GPUs are to be released


@dataclass(frozen=True)
class InteractiveReport:
    """State of the environment. Times are RFC 3339."""

    ready: bool
    """All nodes are here, so that a run could start at once."""
    script: str = ""
    """The run that was asked for and has not ended; '': none."""
    by: str = ""
    since: str | None = None
    idle_since: str | None = None
    """Since when nobody uses it; null: it is in use."""
    idleness: Idleness = Idleness.NONE
    release: str | None = None
    """Time at which its GPUs are released if nobody uses it."""


@dataclass(frozen=True)
class Asked:
    """An agent passes on what somebody on its node wants to run on all nodes. Said again after a connection was lost."""

    id: str
    command: tuple[str, ...]
    """The script, or a program, and its arguments; no shell reads them."""
    folder: str
    """Folder in which it runs, on every node."""
    by: str
    detached: bool = False
    """Its end is not waited for: it goes on when whoever asked is gone."""
    again: bool = False

    @property
    def text(self) -> str:
        """The command, as a person would type it."""
        return shlex.join(self.command)


@dataclass(frozen=True)
class Interrupted:
    """Whoever asked wants it to stop: the first time ranks may save, then they are killed."""

    id: str
    """'': whatever runs."""
    why: str
    reply: str = ""
    """Id under which it is answered; '': not at all."""


@dataclass(frozen=True)
class Found:
    """A node's answer to Find: it can run what was asked for, or why not."""

    id: str
    problem: str = ""
    """One sentence, if it couldn't."""
    digest: str = ""
    """Digest of the script's content, so that a node with an older one is noticed; '': it is no script."""


@dataclass(frozen=True)
class Printed:
    """Lines of this node's ranks, in their order."""

    attempt: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class InUse:
    """Somebody works on this node: a shell, or a program that was started by hand."""


@dataclass(frozen=True)
class Find:
    """An order to every node before a run: look for this script."""

    id: str
    command: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Show:
    """An order to the node of whoever asked: show what the ranks of all nodes print, and what Lockstep says of the run."""

    id: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """An order to the node of whoever asked: the run is over, or was refused."""

    id: str
    exit_code: int
    """Exit code of the rank that failed first; 0: every rank ended well."""
    message: str
