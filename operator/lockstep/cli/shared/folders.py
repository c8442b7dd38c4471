"""Your folders: those of cluster files, and that of what is remembered of clusters. None of them is where this code lies."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.plan.cluster.choice import VARIABLE, Choice, choices
from lockstep.platforms.output import tell
from lockstep_spec.files import write_durably


def current_folder() -> Path:
    """Return the folder where one stands. Raises ConfigError where it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was removed: change to another one") from None


def from_here(path: Path) -> Path:
    """Return the path as one would type it: relative where it is below the current folder."""
    here = current_folder()
    return path.relative_to(here) if path.is_relative_to(here) else path


def checkout() -> Path | None:
    """Return the checkout of Lockstep that one stands in: the current folder, or one above it. One of another user is none."""
    here = current_folder()
    marks = ("clusters", "manifests/crds", "operator/lockstep")
    return next((one for one in (here, *here.parents) if all((one / mark).is_dir() for mark in marks) and is_ours(one / "clusters")), None)


def is_ours(path: Path) -> bool:
    """Return True if a file or folder is this user's or root's. What another user has written is not believed unasked: a cluster file may
    name programs for ssh to run.
    """
    try:
        return str(path.stat().st_uid) in ("0", str(os.geteuid()), os.environ.get("SUDO_UID"))
    except OSError:
        return False


def clusters_here() -> Path:
    """Return the folder where new cluster files go: clusters/ of the checkout that one stands in, else of the current folder."""
    return (checkout() or current_folder()) / "clusters"


def cluster_folders() -> list[Path]:
    """Return the folders whose cluster files have names: clusters/ where one stands, unless it is another user's, then that of the user's
    configuration.
    """
    here = [] if clusters_here().is_dir() and not is_ours(clusters_here()) else [clusters_here()]
    with suppress(ConfigError):
        return [*here, _of_user("XDG_CONFIG_HOME", ".config") / "clusters"]
    return here


STATE = "LOCKSTEP_STATE"
"""Names the folder for what is remembered; the Makefile and scripts/sync-multi-node.sh read it, too."""
STATE_HERE = ".lockstep"


QUICKSTART = "quickstart"
"""Workspace of `lockstep quickstart --local`, in the folder of what is remembered."""


def state_folder() -> Path:
    """Return the folder for what is remembered, such as the cluster in use: $LOCKSTEP_STATE, else .lockstep/ of the checkout that one
    stands in, else the user's.

    Raises:
        ConfigError: the user has no home folder, and no variable names another.
    """
    if named := os.environ.get(STATE):
        return Path(named)
    root = checkout()
    return root / STATE_HERE if root is not None else _of_user("XDG_STATE_HOME", ".local/state")


def _of_user(variable: str, usual: str) -> Path:
    """Return Lockstep's folder of a kind, as the XDG Base Directory Specification places it; a relative path in the variable doesn't count
    there.
    """
    stated = os.environ.get(variable, "")
    try:
        return (Path(stated) if stated.startswith("/") else Path.home() / usual) / "lockstep"
    except RuntimeError:
        raise ConfigError(f"this user has no home folder: ${variable} or ${STATE} names the folder for what Lockstep remembers") from None


def write_state(name: str, text: str) -> Path:
    """Write a file of the state folder, which only this user may read, whole or not at all, and return its path. Raises ConfigError."""
    path = made_state_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text.encode())
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def made_state_folder() -> Path:
    """Return the state folder, which is made if need be, for this user alone. Raises ConfigError."""
    folder = state_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{from_here(path)} can't be written ({error.strerror}): ${STATE} names another folder")


FORCED = "forced"
SERVERS = "servers"
"""Folder of the API servers that clusters were deployed to whose files state no cluster.api."""
IN_USE = "cluster"
"""File with the cluster that is meant where none is named, here and in the Makefile."""


def remember(cluster: str) -> None:
    """Make it the default from now on. `cluster`: a name, an absolute path of a file, or the folder of a workspace. Raises ConfigError."""
    write_state(IN_USE, f"{cluster}\n")


def _keep(name: str, text: str) -> None:
    """Write a line of what is remembered; where that can't be, say so: what a verb does is not lost with it."""
    try:
        write_state(name, f"{text}\n")
    except ConfigError as error:
        tell(f"warning: not remembered: {error}")


def remembered() -> list[Choice]:
    """Return what names a cluster where no option does, the one that counts first: the environment, the folder where one stands, `lockstep
    use`.
    """
    folder = used = None
    if os.environ.get(STATE):
        used = _read(state_folder() / IN_USE)
    else:
        path = (checkout() or current_folder()) / STATE_HERE / IN_USE
        folder = _read(path)
        if folder is not None and not is_ours(path):
            _tell_once(f"note: {from_here(path)} belongs to another user, so it doesn't count")
            folder = None
        with suppress(ConfigError):
            used = _read(_of_user("XDG_STATE_HOME", ".local/state") / IN_USE)
    return choices(None, os.environ.get(VARIABLE), folder, used)


def remember_forced(cluster: str, server: str) -> None:
    """Take this API server for the cluster's from now on, though its file names another: a deployment was forced there."""
    _keep(f"{FORCED}/{cluster}", server)


def was_forced(cluster: str, server: str) -> bool:
    """Return True if a deployment of this cluster was forced to this API server from here."""
    return _server_of(FORCED, cluster) == server


def remember_server(cluster: str, server: str) -> None:
    """Remember where a cluster is whose file doesn't say so: its verbs are kept to this API server until it is deployed to another."""
    _keep(f"{SERVERS}/{cluster}", server)


def server_of(cluster: str) -> str | None:
    """Return the API server that a cluster was deployed to from here whose file doesn't say where it is."""
    return _server_of(SERVERS, cluster)


def _server_of(folder: str, cluster: str) -> str | None:
    with suppress(ConfigError):
        return _read(state_folder() / folder / cluster)
    return None


@cache
def _tell_once(line: str) -> None:
    tell(line)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def forget(cluster: str, as_remembered: str | None = None) -> None:
    """Forget a cluster that is gone, so that it is no verb's default; where that can't be, say so. `as_remembered`: as `remember` was told
    it, if not by its name.
    """
    try:
        folder = state_folder()
        for name in (FORCED, SERVERS):
            (folder / name / cluster).unlink(missing_ok=True)
        if _read(folder / IN_USE) in (cluster, as_remembered):
            (folder / IN_USE).unlink(missing_ok=True)
    except (OSError, ConfigError) as error:
        tell(f"warning: cluster {cluster} is gone, but still remembered: {error}")
