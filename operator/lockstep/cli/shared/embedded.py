"""The embedded cluster as verbs see it: part of every checkout, and of no installed wheel."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.platforms.output import tell

if TYPE_CHECKING:
    from lockstep.devcluster.host.layout import Layout


def embedded_layout() -> Layout | None:
    """Places and addresses of the embedded cluster, up or not; None where this installation has none."""
    try:
        from lockstep.devcluster.host.layout import default_layout
    except ModuleNotFoundError:
        return None
    return default_layout()


def require_layout() -> Layout:
    """Return `embedded_layout()`. Raises ConfigError where this installation has none."""
    layout = embedded_layout()
    if layout is None:
        raise ConfigError("the embedded cluster is not part of an installed Lockstep: clone the repository, then `make cluster-up` there")
    return layout


@contextmanager
def machine_failures() -> Iterator[None]:
    """Turn what goes wrong on the machine into one sentence and exit code 1; a second call may mend it."""
    try:
        yield
    except (Failed, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        tell(f"lockstep: {error}")
        raise typer.Exit(1) from error


def publish_checkout() -> str:
    """Give the embedded cluster's pods this checkout's code, and return the name of the copy. Raises ConfigError as `require_layout`."""
    layout = require_layout()
    from lockstep.devcluster.python_volume import publish_code

    return publish_code(layout.python_volume).name
