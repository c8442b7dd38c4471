"""`lockstep run [--job NAME] SCRIPT [ARGS…]`: a script on all nodes of a dev environment."""

from __future__ import annotations

import asyncio
import getpass
import socket
from collections.abc import Sequence
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.cli.jobargs import Found, find_job


def run_in_job(words: Sequence[str], job: str, place: tuple[str, str | None, str | None], *, detach: bool) -> int:
    """The exit code of the rank that failed first. `place`: cluster file, namespace, context."""
    from lockstep.platforms.kubernetes.devrun import agent_command, run_on_all_nodes

    found = find_job(job, *place)
    refuse(found)
    command = agent_command(words, _who(), detach=detach)
    return asyncio.run(run_on_all_nodes(place[2], found.namespace, job, command))


def refuse(found: Found) -> None:
    """Raises ConfigError where no node waits for what it is asked to run, with what to do about it."""
    from lockstep.plan.readstatus import condition, is_true

    name, status = found.name, found.job.get("status") or {}
    if found.job["spec"].get("type") != "Interactive":
        raise ConfigError(f"job {name} is a Batch job, which runs what it was made for: scripts are run in one of type Interactive")
    if is_true(status, "Failed"):
        raise ConfigError(f"{name} has failed: {condition(status, 'Failed')['message']}: lockstep retry {name} -n {found.namespace}")
    stopped: dict[str, Any] = condition(status, "Suspended")
    if stopped.get("status") == "True" or stopped.get("reason") == "Stopping":
        raise ConfigError(f"{name} has no pods now: bring it back with lockstep resume {name} -n {found.namespace}")
    progress: dict[str, Any] = condition(status, "Progressing")
    if progress.get("status") == "False":
        raise ConfigError(f"{name} can't run anything now: {progress['message']}: lockstep why {name} -n {found.namespace}")


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name
        return socket.gethostname()
