"""End a run that was only measured, and remove its folder: sent into each of its pods. `python3 -c THIS '{"root":
"/workspace/runs/.measured-x"}'`

Ranks that are asked to stop would save first, and bring the folder back. So they are killed, and the folder goes once the gang has written
how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from lockstep_machine.processes import rank_processes, run_dir_of

END_SECONDS = 5.0
"""Wait for the record of the end. A run that is cut off before its ranks start writes none."""
POLL_SECONDS = 0.05
QUIET_SECONDS, MOST_SECONDS = 2.0, 20.0
"""Time for which nobody may have brought the folder back, and the most that is waited for that."""


def forget(root: Path) -> None:
    """Kill the ranks of this run that are here, and remove its folder."""
    for process, environment in list(rank_processes()):
        if run_dir_of(environment) == str(root):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(process.name), signal.SIGKILL)
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end and root.exists() and not (root / "gang" / "end.json").exists():
        time.sleep(POLL_SECONDS)
    end = time.monotonic() + MOST_SECONDS
    quiet = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < min(quiet, end):  # an agent that ends, or is started again by the kubelet, brings it back
        if root.exists():
            shutil.rmtree(root, ignore_errors=True)  # (another pod may be at it, too)
            quiet = time.monotonic() + QUIET_SECONDS
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    forget(Path(json.loads(sys.argv[1])["root"]))
