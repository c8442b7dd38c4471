"""Folders of the checkout and of what it remembers."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.api.errors import ConfigError


def from_here(path: Path) -> Path:
    """Return the path as one would type it: relative where it is below the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def checkout() -> Path:
    """Return the folder that has clusters/ and manifests/: the checkout this code runs from, else the current folder.

    Raises:
        ConfigError: neither has them.
    """
    for folder in (Path(__file__).resolve().parents[4], Path.cwd()):
        if (folder / "manifests" / "crds").is_dir() and (folder / "clusters").is_dir():
            return folder
    raise ConfigError(f"{Path.cwd()} has no clusters/ and manifests/: run lockstep in a checkout of Lockstep")


STATE = "LOCKSTEP_STATE"
"""Names the folder for what a checkout remembers; the Makefile and scripts/sync-multi-node.sh read it, too."""


def state_folder() -> Path:
    """Return the folder for what this checkout remembers, such as the cluster deployed last: $LOCKSTEP_STATE, else .lockstep/.

    Raises:
        ConfigError: there is no checkout, and the variable names no folder.
    """
    named = os.environ.get(STATE)
    return Path(named) if named else checkout() / ".lockstep"
