"""Which cluster was deployed last from this checkout, and to which API server: what verbs go by where no cluster is named."""

from __future__ import annotations

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.paths import checkout, state_folder

FORCED = "forced"
PLACES = "servers"
"""Where a cluster whose file states no cluster.api was deployed to."""
LAST = "cluster"
"""Which cluster is meant where none is named, here and in the Makefile: the one that was deployed last."""


def remember(cluster: str) -> None:
    """The default from now on."""
    path = state_folder() / LAST
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{cluster}\n", encoding="utf-8")


def remember_forced(cluster: str, server: str) -> None:
    """Take this API server for the cluster's from now on, though its file names another: a deployment was forced there."""
    _write_server(FORCED, cluster, server)


def was_forced(cluster: str, server: str) -> bool:
    """Whether a deployment of this cluster was forced to this API server from this checkout."""
    return _read_server(FORCED, cluster) == server


def remember_server(cluster: str, server: str) -> None:
    """Where a cluster is whose file doesn't say so: its verbs are kept to this API server until it is deployed to another."""
    _write_server(PLACES, cluster, server)


def server_of(cluster: str) -> str | None:
    """Where this checkout has deployed a cluster whose file doesn't say where it is."""
    return _read_server(PLACES, cluster)


def _write_server(folder: str, cluster: str, server: str) -> None:
    path = state_folder() / folder / cluster
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{server}\n", encoding="utf-8")


def _read_server(folder: str, cluster: str) -> str | None:
    try:
        return (state_folder() / folder / cluster).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError, ConfigError):
        return None


def deployed_last() -> str | None:
    """The cluster that was deployed last, as long as clusters/ has its file. None: none was, or this is no checkout."""
    try:
        root = checkout()
        name = (state_folder() / LAST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError, ConfigError):
        return None
    return name if (root / "clusters" / f"{name}.yaml").is_file() else None


def forget(cluster: str) -> None:
    """A cluster that is gone is nobody's default."""
    for folder in (FORCED, PLACES):
        (state_folder() / folder / cluster).unlink(missing_ok=True)
    if deployed_last() == cluster:
        (state_folder() / LAST).unlink(missing_ok=True)
