"""Errors that end a verb of the command line with one sentence instead of a traceback.

LockstepError
├── ConfigError   what was written can't be used: exit code 2
└── Failed        it was right but could not be done: exit code 1; subclasses live where they are raised
"""

from __future__ import annotations


class LockstepError(Exception):
    """The message says what was read or tried, where, and what to do.

    Several arguments are several lines. What a line quotes makes no further ones when it is printed.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class ConfigError(LockstepError):
    """Raised where what was written can't be used. The message has one line for each mistake: where it is, what is valid, what to do. The
    command line exits with 2.
    """


class Failed(LockstepError):
    """Raised where a request could not be carried out: a cluster refused, a pod did not come up. The command line exits with 1."""
