"""Exit codes of commands, of the agent, of the trainer and of its ranks."""

from __future__ import annotations

DONE = 0
FAILED = 1
USAGE = 2
"""A command can't be done as it is written."""
UNREACHABLE = 69
"""An agent reaches nobody and has left its last words (sysexits' EX_UNAVAILABLE): whoever started it starts it again."""
INTERNAL = 70
"""An agent met something that it doesn't know (sysexits' EX_SOFTWARE): no verdict on the job, whoever started it starts it again."""
SAVED = 75
"""Saved and stopped, as asked (sysexits' EX_TEMPFAIL)."""
HANG = 76
OUT_OF_MEMORY = 77
CONFIGURATION = 78
"""The request can't be met, and the same again would fail the same way (sysexits' EX_CONFIG)."""
NON_FINITE = 79
INTERRUPTED = 130
"""Ended by Ctrl-C or SIGTERM, as a shell has it."""

MEANINGS = {
    DONE: "done",
    SAVED: "saved and stopped as asked",
    HANG: "hang",
    OUT_OF_MEMORY: "out of memory",
    CONFIGURATION: "configuration",
    NON_FINITE: "non-finite loss or gradient",
}
"""Exit codes of Lockstep's trainer in words. A user's own script may mean anything else by the same numbers."""
