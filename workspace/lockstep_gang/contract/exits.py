"""Exit codes, and the times the gang keeps."""

from __future__ import annotations

DONE = 0
FAILED = 1
SAVED = 75  # saved and stopped as asked (sysexits' EX_TEMPFAIL)
HANG = 76
OUT_OF_MEMORY = 77
CONFIGURATION = 78  # sysexits' EX_CONFIG: the same again would fail the same way
NON_FINITE = 79

MEANINGS = {
    DONE: "done",
    SAVED: "saved and stopped as asked",
    HANG: "hang",
    OUT_OF_MEMORY: "out of memory",
    CONFIGURATION: "configuration",
    NON_FINITE: "non-finite loss or gradient",
}
"""Of Lockstep's trainer only: a user's own script may mean anything else by the same numbers."""

PING_SECONDS = 5.0
"""The coordinator speaks to every agent at least this often, and is answered."""

SILENCE_SECONDS = 30.0
"""An end that was not heard for so long is gone: an agent stops its ranks and waits, the coordinator stops the attempt."""

RECONNECT_SECONDS = 5.0
"""A connection that was closed, not just silent, may come back within this; a dead process closes its connections at once."""
