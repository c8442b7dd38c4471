"""Verbs of the command line that serve something until Ctrl-C, and what their pods run meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.clusters.cluster_jobs import Jobs

LOCKSTEP = [sys.executable, "-m", "lockstep.cli.main"]


@contextmanager
def started(jobs: Jobs, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A verb that goes on until Ctrl-C, which it gets."""
    command = [*LOCKSTEP, *arguments, "-n", jobs.namespace]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.communicate()


def all_processes(jobs: Jobs, kubectl: Callable[..., subprocess.CompletedProcess[str]], pod: str) -> str:
    """Arguments and variables of everything in the pod, but for this look itself."""
    look = "import glob\nfor p in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n"
    look += " try: print(open(p).read() if 'all_processes' not in open(p).read() else '')\n except OSError: pass\n# all_processes"
    return kubectl("exec", "-n", jobs.namespace, pod, "-c", "trainer", "--", "python3", "-c", look).stdout
