"""Where the command line finds what it needs: the checkout's files and the cache."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.api.errors import ConfigError


def checkout() -> Path:
    """The folder that has clusters/ and manifests/: the checkout this code runs from, else the current folder.

    Raises:
        ConfigError: neither has them.
    """
    for folder in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (folder / "manifests" / "crds").is_dir() and (folder / "clusters").is_dir():
            return folder
    raise ConfigError(f"{Path.cwd()} has no clusters/ and manifests/: run lockstep in a checkout of Lockstep")


def cache_root() -> Path:
    """Where costly things are kept: $LOCKSTEP_CACHE, else lockstep/ in the user's cache folder."""
    own, base = os.environ.get("LOCKSTEP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(base) if base else Path.home() / ".cache") / "lockstep"
