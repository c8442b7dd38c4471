"""How this process ends: its exit code, and no accident on the way out."""

from __future__ import annotations

import os
import sys

from lockstep_train.base.errors import EXIT_FAILED, EXIT_HANG, EXIT_OUT_OF_MEMORY, TrainerError, out_of_memory

_NOT_JOINED = ("Timed out waiting", "NCCL operation timed out", "collective operation timed out", "collective operation timeout")
"""Words of gloo and of both NCCL backends for a collective that some rank didn't join."""


def exit_code_of(error: BaseException) -> int:
    """What the agent reads. A plain TrainerError is judged by what led to it."""
    if isinstance(error, TrainerError) and error.exit_code != EXIT_FAILED:
        return error.exit_code
    if out_of_memory(error):
        return EXIT_OUT_OF_MEMORY
    return EXIT_HANG if any(words in str(error) for words in _NOT_JOINED) else EXIT_FAILED


def leave_process(code: int) -> None:
    """End this process at once. Native threads of gloo and NCCL can abort a process in its static destructors, and the
    exit code is what the agent judges by; so nothing runs after the streams are flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
