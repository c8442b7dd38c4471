"""Duties of an agent on a machine without Kubernetes: it listens on its stated address alone, and tidies up when the job has ended."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from lockstep_gang.agent.ranks.environment import inherited
from lockstep_gang.contract.run import POD_IPS, HostPlace

DISABLE_SECONDS = 10.0


def listen_on(address: str) -> None:
    """Let this process and its ranks listen on this address alone, if it is a number. A name may be another address here than elsewhere:
    127.0.1.1 in many hosts files.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address)
        os.environ[POD_IPS] = address


def tidy_up(host: HostPlace, key_file: Path, say: Callable[[str], None]) -> None:
    """Remove the job's key and disable the unit that starts this agent: a job that has ended needs neither. What can't be done is said, and
    harms nothing.
    """
    try:
        key_file.unlink(missing_ok=True)
    except OSError as error:
        say(f"cannot remove the job's key {key_file} ({error.strerror}): remove it, the job has ended")
    if host.unit:
        problem = _disable(host.unit)
        if problem:
            say(f"cannot disable {host.unit} ({problem}): run `systemctl --user disable {host.unit}`, else it starts with this machine")


def _disable(unit: str) -> str:
    """Reason why it could not be disabled; empty if it was."""
    try:
        done = subprocess.run(
            ["systemctl", "--user", "disable", "--quiet", unit],
            env=inherited(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DISABLE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return getattr(error, "strerror", None) or f"no answer in {DISABLE_SECONDS:.0f} s"
    return "" if done.returncode == 0 else done.stderr.strip()[-200:] or f"it ended with {done.returncode}"


def remove_inputs(run_path: Path, key_file: Path) -> None:
    """Remove the files that a command line made for its agents and couldn't remove before it was killed: the run, its key, and their
    folder.
    """
    with contextlib.suppress(OSError):  # another of its agents was faster, or its folder holds something else
        run_path.unlink()
        key_file.unlink(missing_ok=True)  # gone with the job's end
        run_path.parent.rmdir()
