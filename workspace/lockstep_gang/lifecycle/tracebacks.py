"""Exceptions in a rank's output: the last one of Python or C++, and those that led to it (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep_spec.words import any_of

# torch puts "[rank1]: " before every line of a traceback once a process group exists.
_RANK = r"^(?:\[rank\d+\]: )?"
_CLASS = r"([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)|[a-z]+error)"
EXCEPTION_LINE = re.compile(rf"{_RANK}(?:[A-Za-z_][\w]*\.)*{_CLASS}(?::(?: (.*))?)?$")
"""The last line of a Python traceback, whose beginning may be out of sight."""
FRAME_LINE = re.compile(rf"{_RANK}(?:(?:Exception Group )?Traceback \(most recent call last\):|  File \".*\", line \d+)")
NOISE = any_of(
    r"\s*$",
    r"(?:\[rank\d+\]:? ?)?\[?[IWEF](?:\d{4}|\]) ",
    r"Exception ignored in|.*\bresource_tracker\b",
    r"terminate called|Aborted|Fatal Python error",
)
"""Lines that are written while a process ends, after the exception that ended it."""
LEFT_OUT = "[…]"
"""Stand-in for lines between those of an exception and the last ones."""
_INSIDE = re.compile(rf"{_RANK}\s")
_ANY_EXCEPTION_LINE = re.compile(rf"{_RANK}(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::(?: (.*))?)?$")
"""Line after a traceback's last frame: an exception may have any name."""
_RAISED_FROM = re.compile(rf"{_RANK}The above exception was the direct cause of the following exception:")
_RAISED_WHILE_HANDLING = re.compile(rf"{_RANK}During handling of the above exception, another exception occurred:")
_OF_A_GROUP = re.compile(r"^\s*\| ?|^  \+ (?=Exception Group Traceback)")
_MEMBER = re.compile(r"^\s*\+-\+?-+ \d+ -+$")
_END_OF_GROUP = re.compile(r"^\s*\+-+$")
_CHILD_ENDED = frozenset({"CalledProcessError", "ChildFailedError", "ProcessExitedException"})
"""Exceptions of subprocess, torchrun and torch.multiprocessing that say no more than that a child ended; it has written why before."""
_IGNORED = re.compile(rf"{_RANK}(?:Exception ignored |Error in atexit\._run_exitfuncs)")
"""Line before an exception that ends nothing: of a finalizer, or of a function that runs at the exit."""
_TERMINATED = re.compile(r"terminate called after throwing an instance of '(?:\w+::)*(\w+)'?")
_WHAT = "  what():  "
MESSAGE_LINES = 20
"""Number of lines of an exception's message; what follows belongs to others."""


@dataclass(frozen=True)
class Raised:
    """An exception, by its class's name without modules."""

    exception: str
    message: str = ""
    led_by: tuple[Raised, ...] = ()
    """The exceptions that it was raised from, or while they were handled, or that it has as its members, the nearest first."""
    explicit: bool = True
    """True in `led_by` if whoever raised the next one said that this one is its cause; False: that one came while this one was handled."""

    @property
    def words(self) -> str:
        return f"{self.exception}: {self.message}"

    @property
    def is_of_a_child(self) -> bool:
        """True if it says no more than that a child ended."""
        return self.exception in _CHILD_ENDED

    @property
    def first_line(self) -> str:
        """First line of its message that says anything: it may begin with an empty one, or with a ruler. A sentence that goes on is
        joined.
        """
        lines = [line.strip() for line in self.message.split("\n") if any(map(str.isalnum, line))] or [self.message.strip()]
        return " ".join(lines[:2]) if len(lines) > 1 and lines[1][0].islower() and lines[0][-1].isalnum() else lines[0]


class ExceptionLines:
    """Lines of an output that name the last exception and those that led to it: what hooks print after it may be longer than what is
    kept.
    """

    def __init__(self) -> None:
        self._chain: list[str] = []
        self._inside = self._ignored = False

    def has_new(self, line: str) -> bool | None:
        """Return True if `line` begins another chain, False if it goes on with this one; None: it is of none."""
        if _IGNORED.match(line):
            self._ignored = True
        elif FRAME_LINE.match(line):
            self._inside = True
        elif self._inside and _INSIDE.match(line):
            pass
        elif self._ignored:
            self._ignored = self._inside = False
        elif self._inside or EXCEPTION_LINE.match(line):
            begins = not (self._chain and _is_link(self._chain[-1]))
            self._chain, self._inside = [*([] if begins else self._chain), line], False
            return begins
        elif self._chain and _is_link(line):
            self._chain.append(line)
            return False
        return None


def says_child_ended(line: str) -> bool:
    """Return True for the line of an exception that says no more than that a child ended."""
    match = EXCEPTION_LINE.match(line)
    return match is not None and match[1] in _CHILD_ENDED


def _is_link(line: str) -> bool:
    return _RAISED_FROM.match(line) is not None or _RAISED_WHILE_HANDLING.match(line) is not None


def raised_in(lines: Sequence[str]) -> Raised | None:
    """The exception of the last Python traceback, with what led to it, else the one that nothing caught in C++."""
    chain: list[Raised] = []
    link = ""
    inside = open_ = ignored = False
    for line in lines:
        text = _OF_A_GROUP.sub("", line)
        if _MEMBER.match(line):
            link, inside, open_ = "member", False, False
        elif _END_OF_GROUP.match(line):
            inside = open_ = False
        elif _RAISED_FROM.match(text) or _RAISED_WHILE_HANDLING.match(text):
            link, inside, open_ = "cause" if _RAISED_FROM.match(text) else "context", False, False
        elif _IGNORED.match(text):
            ignored, open_ = True, False
        elif FRAME_LINE.match(text):
            inside, open_ = True, False
        elif inside and _INSIDE.match(text):
            continue
        elif ignored:
            ignored = inside = False
        else:
            match = (_ANY_EXCEPTION_LINE if inside or link else EXCEPTION_LINE).match(text.strip())
            if match:
                new = Raised(match[1], match[2] or "")
                chain = _linked(chain, new, link or ("cause" if new.is_of_a_child else ""))
                open_ = True
            elif open_ and text != LEFT_OUT and not NOISE.match(text):
                chain[0] = _longer(chain[0], text)
            else:
                open_ = False
            link, inside = "", False
    return chain[0] if chain else _terminated(lines)


def _linked(chain: list[Raised], new: Raised, link: str) -> list[Raised]:
    """The newest exception first in a list of one; those that led to it are within it."""
    if link == "member" and chain:
        return [replace(chain[0], led_by=(*chain[0].led_by, new))]
    if link and chain:
        before = replace(chain[0], led_by=(), explicit=link == "cause")
        return [replace(new, led_by=(before, *chain[0].led_by))]
    return [new]


def _longer(raised: Raised, line: str) -> Raised:
    """The exception with a further line of its message; of a group, that of its last member."""
    if raised.exception.endswith("ExceptionGroup") and raised.led_by:
        return replace(raised, led_by=(*raised.led_by[:-1], _longer(raised.led_by[-1], line)))
    return raised if raised.message.count("\n") >= MESSAGE_LINES else replace(raised, message=f"{raised.message}\n{line}")


def _terminated(lines: Sequence[str]) -> Raised | None:
    for index, line in reversed([*enumerate(lines)]):
        match = _TERMINATED.match(line)
        if match is not None:
            words = [line.removeprefix(_WHAT) for line in lines[index + 1 :][:MESSAGE_LINES] if not NOISE.match(line)]
            return Raised(match[1], "\n".join(words))
    return None
