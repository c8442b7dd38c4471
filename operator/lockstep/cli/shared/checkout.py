"""The checkout: its folders, and its memory of the cluster deployed last and of API servers: verbs go by it where no cluster is named."""

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


FORCED = "forced"
PLACES = "servers"
"""Folder of the API servers that clusters were deployed to whose files state no cluster.api."""
LAST = "cluster"
"""File with the cluster that is meant where none is named, here and in the Makefile: the one deployed last."""


def remember(cluster: str) -> None:
    """Make it the default from now on. `cluster`: its name, or the absolute path of its file."""
    _write(LAST, cluster)


def remember_forced(cluster: str, server: str) -> None:
    """Take this API server for the cluster's from now on, though its file names another: a deployment was forced there."""
    _write(f"{FORCED}/{cluster}", server)


def was_forced(cluster: str, server: str) -> bool:
    """Return True if a deployment of this cluster was forced to this API server from this checkout."""
    return _read_server(FORCED, cluster) == server


def remember_server(cluster: str, server: str) -> None:
    """Remember where a cluster is whose file doesn't say so: its verbs are kept to this API server until it is deployed to another."""
    _write(f"{PLACES}/{cluster}", server)


def server_of(cluster: str) -> str | None:
    """Return the API server that this checkout deployed a cluster to whose file doesn't say where it is."""
    return _read_server(PLACES, cluster)


def _write(name: str, text: str) -> None:
    path = state_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def _read_server(folder: str, cluster: str) -> str | None:
    try:
        return (state_folder() / folder / cluster).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError, ConfigError):
        return None


def deployed_last() -> str | None:
    """The cluster that was deployed last, by its name or the path of its file, as long as that is there. None: none was, or this is no checkout."""
    try:
        root = checkout()
        name = (state_folder() / LAST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError, ConfigError):
        return None
    return name if (root / "clusters" / f"{name}.yaml").is_file() or Path(name).is_file() else None


def forget(cluster: str, remembered: str | None = None) -> None:
    """Forget a cluster that is gone, so that it is no verb's default. `remembered`: as `remember` was told it, if not by its name."""
    for folder in (FORCED, PLACES):
        (state_folder() / folder / cluster).unlink(missing_ok=True)
    if deployed_last() == (remembered or cluster):
        (state_folder() / LAST).unlink(missing_ok=True)
