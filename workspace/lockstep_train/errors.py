"""How a run ends other than well, and the exit code the agent reads for each.

TrainerError
├── ConfigError     78  what the user asked for can't be done; retrying can't help
├── Stopped         75  saved and stopped, as asked by SIGTERM
├── Hang            76  something took longer than its limit
└── NonFinite       79  a loss or a gradient norm is NaN or infinite
"""

from __future__ import annotations

import sys

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_STOPPED = 75
EXIT_HANG = 76
EXIT_OUT_OF_MEMORY = 77
EXIT_CONFIG = 78
EXIT_NON_FINITE = 79


class TrainerError(Exception):
    """An end of the run that the trainer itself decided on."""

    exit_code = EXIT_FAILED


class ConfigError(TrainerError):
    """One sentence: what was read, where, what is valid and what to do."""

    exit_code = EXIT_CONFIG


class Stopped(TrainerError):
    """The state is committed and the ranks agreed to stop."""

    exit_code = EXIT_STOPPED


class Hang(TrainerError):
    """Names the activity and, where it is known, the rank that the others wait for."""

    exit_code = EXIT_HANG


class NonFinite(TrainerError):
    """Names the rank and the step; nothing of that step was applied or saved."""

    exit_code = EXIT_NON_FINITE


def first_line(error: BaseException) -> str:
    """Of a library's error, which may go on with advice for others."""
    return str(error).strip().split("\n", 1)[0]


def tell(error: TrainerError | OSError) -> int:
    """A command's error as one sentence for people; the command's exit code."""
    if isinstance(error, TrainerError):
        print(f"lockstep: {error}", file=sys.stderr)
        return error.exit_code
    where = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or error
    print(f"lockstep: {where}{reason}; see that the folders can be read and written to, and that the volume has room", file=sys.stderr)
    return EXIT_FAILED
