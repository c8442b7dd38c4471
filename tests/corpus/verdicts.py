"""What a fault must be called, what was said of it, and how the two compare (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Score(StrEnum):
    """How good an answer is."""

    RIGHT = "right"
    VAGUE = "vague"  # true, but it names no cause, another rank's absence, or no remedy that helps
    WRONG = "wrong"  # it blames what is not to blame, or the job ends in another state


@dataclass(frozen=True)
class Expected:
    """What a person who knows the fault would say of it."""

    cause: str
    """`status.failure.cause`, the reason of a condition while the job waits, or empty where nothing failed."""
    says: str
    """A pattern that the summary or the last lines have."""
    remedy: str
    """A pattern in the next commands and what they are for, or in the summary."""
    rank: int | None = None
    node: int | None = None
    state: str = "Failed"
    everybody: bool = False
    """All ranks fail the same way: any of them may be named."""
    never: str = ""
    """A pattern that neither words nor remedies may have: it would send the reader elsewhere."""


@dataclass(frozen=True)
class Answer:
    """What `lockstep why JOB -o json` said."""

    state: str
    cause: str
    rank: int | None
    node: int | None
    words: str
    """Summary, first cause and last lines."""
    remedies: str
    """The next commands and what they are for, and the sentences that may have one too."""


@dataclass(frozen=True)
class Fault:
    """One row of the corpus."""

    id: str
    what: str
    expected: Expected


_FIRST_CAUSE = re.compile(r"^(?:rank (?P<rank>\d+))?(?: on )?(?:node (?P<node>\d+))?[^:]*: (?P<cause>[A-Z][A-Za-z]*)")
_RESTARTED = re.compile(
    r"^attempt \d+ ended at \S+?Z(?:, )?(?:rank (?P<rank>\d+))?(?: on )?(?:node (?P<node>\d+))?: (?P<cause>[A-Z][A-Za-z]*)"
)


def answer(said: dict[str, Any], reason: str = "") -> Answer:
    """`said`: the command's JSON; `reason`: the condition's that keeps the job from running, where nothing failed."""
    first = _FIRST_CAUSE.match(said.get("first_cause", "")) or _RESTARTED.match(said.get("restarted", ""))
    remedies = [f"{step['command']}  # {step['what']}" for step in said.get("next", [])]
    return Answer(
        state=said["state"],
        cause=first["cause"] if first else reason,
        rank=_number(first, "rank"),
        node=_number(first, "node"),
        words="\n".join(
            [
                *(said.get(key, "") for key in ("summary", "first_cause", "refused", "restarted", "stale", "changed")),
                *said.get("last_lines", []),
            ]
        ),
        remedies="\n".join([*remedies, said["summary"], said.get("nodes", ""), said.get("changed", "")]),
    )


def _number(match: re.Match[str] | None, name: str) -> int | None:
    return int(match[name]) if match is not None and match[name] else None


def judge(expected: Expected, given: Answer) -> tuple[Score, str]:
    """The score, and what is not as it should be."""
    wrong = [
        f"{name} is {there!r}, not {wanted!r}"
        for name, wanted, there in (("state", expected.state, given.state), ("cause", expected.cause, given.cause))
        if there and there != wanted
    ]
    wrong += [
        f"{name} {there} is blamed, not {wanted}"
        for name, wanted, there in (("rank", expected.rank, given.rank), ("node", expected.node, given.node))
        if there is not None and there != wanted and not expected.everybody
    ]
    if expected.never and re.search(expected.never, given.words + given.remedies):
        wrong.append(f"it says {expected.never!r}")
    if wrong:
        return Score.WRONG, "; ".join(wrong)
    who = () if expected.everybody else (("rank", expected.rank, given.rank), ("node", expected.node, given.node))
    vague = [f"no {name}" for name, wanted, there in (("cause", expected.cause, given.cause), *who) if wanted not in (None, "", there)]
    vague += [f"nothing says {expected.says!r}"] if not re.search(expected.says, given.words) else []
    vague += [f"no remedy has {expected.remedy!r}"] if not re.search(expected.remedy, given.remedies) else []
    return (Score.VAGUE, "; ".join(vague)) if vague else (Score.RIGHT, "")
