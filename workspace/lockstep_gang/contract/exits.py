"""Exit codes, and the times the gang keeps."""

from __future__ import annotations

DONE = 0
FAILED = 1
INTERNAL = (
    70  # of an agent that met what it doesn't know (sysexits' EX_SOFTWARE): no verdict on the job, whoever started it starts it again
)
UNREACHABLE = (
    69  # of an agent that reaches nobody and has left its last words (sysexits' EX_UNAVAILABLE): whoever started it starts it again
)
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

UNHEARD_SECONDS = 7.5
"""A node that was not heard for so long is told of, and no rank is judged meanwhile: it would have answered by now."""

SILENCE_SECONDS = 30.0
"""An end that was not heard for so long is gone: an agent stops its ranks and waits, the coordinator stops the attempt."""

RECONNECT_SECONDS = 5.0
"""A connection that was closed, not just silent, may come back within this; a dead process closes its connections at once."""

RECONNECTS_A_SECOND = 128
"""A gang whose connections were all lost comes back at this rate, each agent at a moment of its own: a proof takes its time."""

AT_ONCE = 64
"""Agents that may connect at once."""

PROGRESS_SECONDS = (2.0, 10.0)
"""How long an agent puts together what its ranks say of their progress: the least, and the most for a gang of very many ranks."""

RANKS_A_SECOND = 820
"""Of so many ranks the progress is told in a second."""


def reconnect_seconds(nodes: int) -> float:
    """How long a closed connection may take to come back in a gang of so many nodes."""
    return RECONNECT_SECONDS + spread_seconds(nodes)


def spread_seconds(nodes: int) -> float:
    """Over how long the agents of a gang connect again: a small one at once."""
    return max(0, nodes - AT_ONCE) / RECONNECTS_A_SECOND


def progress_seconds(ranks: int) -> float:
    """How long the progress of ranks waits to be told together, in a gang of so many ranks."""
    least, most = PROGRESS_SECONDS
    return min(max(least, ranks / RANKS_A_SECOND), most)
