"""What kind of failure it was, by what the rank said and how it ended (pure).

The kinds are few, because each has its own answer to "will it help to start again, and who must act?".
"""

from __future__ import annotations

import re

from lockstep_gang.contract.exits import CONFIGURATION, HANG, NON_FINITE, OUT_OF_MEMORY
from lockstep_gang.contract.report import Cause

_TRAINER_CODES = {HANG: Cause.HANG, OUT_OF_MEMORY: Cause.OUT_OF_MEMORY, CONFIGURATION: Cause.CONFIGURATION, NON_FINITE: Cause.NON_FINITE}
# By the exception's name first: a message may quote anything.
_EXCEPTIONS = {
    "OutOfMemoryError": Cause.OUT_OF_MEMORY,
    "Hang": Cause.HANG,
    "MemoryError": Cause.OUT_OF_MEMORY,
    "DistBackendError": Cause.FABRIC,
    "DistNetworkError": Cause.FABRIC,
    "DistStoreError": Cause.FABRIC,
    "ConnectionResetError": Cause.FABRIC,
    "ConnectionRefusedError": Cause.FABRIC,
    "BrokenPipeError": Cause.FABRIC,
    "ModuleNotFoundError": Cause.SETUP,
    "ImportError": Cause.SETUP,
}
TIMED_OUT = re.compile(
    r"collective operation (timeout|timed out)|watchdog detected operation timeout|NCCL operation timed out", re.IGNORECASE
)
"""torch's words, of either NCCL backend, for a collective that some rank didn't join in time; then it aborts the process."""
_WORDS = (
    (Cause.OUT_OF_MEMORY, re.compile(r"CUDA out of memory|out of memory\b|can't allocate memory|cannot allocate memory", re.IGNORECASE)),
    (Cause.STORAGE, re.compile(r"No space left on device|Input/output error|Read-only file system|Stale file handle|Disk quota exceeded", re.IGNORECASE)),
    (Cause.HANG, TIMED_OUT),
    (Cause.FABRIC, re.compile(r"\bNCCL (error|WARN|Last Error)|watchdog detected operation error|ncclSystemError|ncclRemoteError|ncclUnhandled|\bgloo\b.*(connection|timeout|closed)|Timed out waiting .* (recv|send) operation", re.IGNORECASE)),
    (Cause.SETUP, re.compile(r"can't open file|No such file or directory: '[^']*\.py'|CUDA driver version is insufficient|Found no NVIDIA driver", re.IGNORECASE)),
)  # fmt: skip
_MEMORY_SIGNALS = frozenset({"SIGBUS"})
"""A write to shared memory that has no room left ends a process by SIGBUS."""


def rank_cause(trainer: bool, exit_code: int | None, signal: str | None, exception: str | None, text: str) -> Cause:
    """`trainer`: Lockstep's own, whose exit codes mean something; `text`: the message and the last lines."""
    if trainer and exit_code in _TRAINER_CODES:
        return _TRAINER_CODES[exit_code]
    if exception in _EXCEPTIONS:
        return _EXCEPTIONS[exception]
    for cause, words in _WORDS:
        if words.search(text):
            return cause
    if signal in _MEMORY_SIGNALS:
        return Cause.OUT_OF_MEMORY
    return Cause.INTERNAL if trainer else Cause.USER_CODE
