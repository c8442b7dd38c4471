"""Program that every Python of a rank runs first, as its `sitecustomize`: `lockstep stacks` can then ask where the process is, and it goes
on.

The answer, the stacks of all its threads, is written by faulthandler within the signal's handler: no matter what holds the interpreter. It
goes to a file without a name in memory, which whoever asks finds among the process's descriptors, so that neither the log nor a volume has
it. The file is called by the number of the signal.

Runs in whatever Python a script is started with, so: the standard library, and nothing of Lockstep's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

NAME = "sitecustomize"
FILE = "lockstep-stacks-"
BELOW_LAST = 5
"""Distance of the signal from the last of those that mean nothing to the system, where neither scripts nor libraries look for one."""
DESCRIPTOR_MIN = 200
"""Number above those that programs expect to have for themselves."""


def can_be_asked() -> None:
    """Register the signal. The rank runs without it where the system or the Python doesn't allow it."""
    with contextlib.suppress(Exception):
        import faulthandler
        import fcntl
        import signal

        number = signal.SIGRTMAX - BELOW_LAST
        first = os.memfd_create(f"{FILE}{number}")
        try:
            descriptor = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, DESCRIPTOR_MIN)
        finally:
            os.close(first)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(number, descriptor, all_threads=True)


def run_next(own: str) -> None:
    """Run the `sitecustomize` that this one stands before, where there is one. The path is as if this one had not been there."""
    sys.path[:] = [path for path in sys.path if path != own]
    spec = PathFinder.find_spec(NAME, sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules[NAME] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == NAME:
    can_be_asked()
    run_next(__file__.rpartition("/")[0])
