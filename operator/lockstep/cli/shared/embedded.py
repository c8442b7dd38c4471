"""The embedded cluster as verbs see it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import typer

from lockstep.api.errors import Failed
from lockstep.platforms.output import tell

if TYPE_CHECKING:
    from lockstep.devcluster.host.layout import Layout


def embedded_layout() -> Layout:
    """Return the places and addresses of the embedded cluster, up or not. Raises ConfigError as `default_layout`."""
    from lockstep.devcluster.host.layout import default_layout

    return default_layout()


def reachable_layout() -> Layout | None:
    """Return the same for verbs that can do without the embedded cluster: None for a user without a home, who can't have one."""
    from lockstep.environments import NoHome

    with suppress(NoHome):
        return embedded_layout()
    return None


@contextmanager
def machine_failures() -> Iterator[None]:
    """Turn what goes wrong on the machine into one sentence and exit code 1; a second call may mend it."""
    try:
        yield
    except (Failed, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        tell(f"lockstep: {error}")
        raise typer.Exit(1) from error


def publish_own_code() -> str:
    """Give the embedded cluster's pods Lockstep's own code, and return the name of the copy."""
    from lockstep.devcluster.python_volume import publish_code

    return publish_code(embedded_layout().python_volume).name
