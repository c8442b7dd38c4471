"""Cluster files: those of clusters/ by their names, any other by its path."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.api.errors import ConfigError
from lockstep.api.names import HOSTS
from lockstep.assets import asset
from lockstep.cli.shared.folders import (
    STATE_HERE,
    checkout,
    cluster_folders,
    clusters_here,
    from_here,
    remember,
    remembered,
    state_folder,
    write_state,
)
from lockstep.platforms.clusters.target import ClusterFiles
from lockstep.platforms.output import tell
from lockstep.platforms.places.backends import DEFAULT_WORKSPACE
from lockstep_spec.files import write_durably

if TYPE_CHECKING:  # the models take 0.4 s to import, which `lockstep --help` needn't wait for
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.plan.pages.why import ClusterHome

LOCAL_CLUSTER = "local"
"""Cluster of what runs on this machine, where none is named."""
SHIPPED = "clusters/local.yaml"
"""Its file, which ships with Lockstep."""
_ENDINGS = (".yaml", ".yml")
TEMPLATES = ("template", "template-hosts")


class Peeked(NamedTuple):
    """Section `cluster` of a cluster file, as far as a connection needs it."""

    name: str
    namespace: str
    api: str | None
    """Host of its API server."""
    is_of_hosts: bool = False
    """True for a file with `platform: hosts`."""


class OwnFiles(ClusterFiles):
    """Your cluster files, as jobs on Kubernetes ask for them."""

    def home(self, named: str) -> ClusterHome | None:
        from lockstep.plan.pages.why import ClusterHome

        try:
            stated = peek(named)
        except ConfigError:
            return None
        return None if stated is None or stated.is_of_hosts else ClusterHome(stated.name, stated.namespace)

    def default_nodes(self, named: str) -> tuple[str, int] | None:
        try:
            profile = load_cluster(named).profile
        except ConfigError:
            return None
        return profile.metadata.name, profile.spec.gpus.default_nodes


def read_text(path: Path) -> str:
    """Return the text of a file; for `-` what is piped in. Raises ConfigError when there is none, or it is no UTF-8."""
    try:
        if str(path) == "-":
            return _piped().decode("utf-8")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error


def _piped() -> bytes:
    """Return what is piped in, which stays there: the verb may go on in another Python (in_full_environment)."""
    data = sys.stdin.buffer.read()
    if sys.stdin is sys.__stdin__:
        with tempfile.TemporaryFile() as again:
            again.write(data)
            again.seek(0)
            os.dup2(again.fileno(), 0)
    return data


class UnknownCluster(ConfigError):
    """No file has this name; the message lists those there are."""


def find_file(name: str) -> Path | None:
    """Return the cluster file of this name: of clusters/ where one stands, of the user's configuration, the one in use, or for `local` the
    one that ships. None: there is none.
    """
    if (path := path_of(name)).is_file():
        return path
    used = [Path(choice.cluster) for choice in remembered() if is_path(choice.cluster) and Path(choice.cluster).stem == name]
    ships = [asset(SHIPPED)] if name == LOCAL_CLUSTER else []
    return next((path for path in (*used, *ships) if path.is_file()), None)


def cluster_names() -> list[str]:
    """Return the names that cluster files have; `local` always has one."""
    return sorted(
        {LOCAL_CLUSTER, *(path.stem for folder in cluster_folders() for path in folder.glob("*.yaml") if path.is_file())} - {*TEMPLATES}
    )


def is_workspace(name_or_path: str) -> bool:
    """Return True for the folder of a workspace on this machine, in place of a cluster: one that is there, or the usual one."""
    return Path(name_or_path) == DEFAULT_WORKSPACE or ("/" in name_or_path and Path(name_or_path).is_dir())


def memorable(name_or_path: str) -> str:
    """Return the cluster as it is to be remembered: by its name in a checkout, whose Makefile reads it, else by its absolute path, so that
    no other folder's file is taken for it.

    Raises UnknownCluster for a name without a file, ConfigError for a path that isn't there.
    """
    if is_workspace(name_or_path):
        folder = Path(name_or_path).resolve()
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "workspace").is_dir()):
            raise ConfigError(f"{name_or_path} is no workspace of this machine: a workspace has a folder workspace/, or is empty")
        return str(folder)
    path = Path(name_or_path).resolve() if is_path(name_or_path) else find_file(name_or_path)
    if path is None:
        raise UnknownCluster(_unknown_cluster(name_or_path))
    if is_path(name_or_path):
        load_cluster(name_or_path)
    root = checkout()
    is_of_checkout = root is not None and root / STATE_HERE == state_folder() and path.parent == root.resolve() / "clusters"
    return path.stem if is_of_checkout or path == asset(SHIPPED) else str(path)


def is_path(name_or_path: str) -> bool:
    """Return True for what has a slash in it or ends in .yaml or .yml."""
    return "/" in name_or_path or name_or_path.endswith(_ENDINGS)


def use(cluster: str) -> None:
    """Make it the cluster of verbs that name none, and say so; where that can't be remembered, say that."""
    try:
        chosen = memorable(cluster)
        remember(chosen)
    except ConfigError as error:
        return tell(f"warning: not remembered: {error}")
    first = remembered()[0]
    other = "" if first.cluster == chosen else f", but here {first.by} names {first.cluster}"
    return tell(f"lockstep: from now on verbs without --cluster are about {cluster}{other} (lockstep use CLUSTER names another)")


def load_cluster(name_or_path: str) -> ClusterFile:
    """Return the cluster file of this name or at this path; for the workspace of this machine that of `local`.

    Raises UnknownCluster for a name without a file, ConfigError with every mistake in it.
    """
    from lockstep.api.files.clusterfile import parse_cluster_file

    if is_path(name_or_path) and not is_workspace(name_or_path):
        if not name_or_path.endswith(_ENDINGS) and not Path(name_or_path).exists():
            raise ConfigError(f"there is no {name_or_path}: name a cluster, its file (.yaml), or a folder of this machine that is there")
        return parse_cluster_file(read_text(Path(name_or_path)), name_or_path)
    name = LOCAL_CLUSTER if is_workspace(name_or_path) else name_or_path
    path = find_file(name)
    if path is None:
        raise UnknownCluster(_unknown_cluster(name))
    path = from_here(path)
    cluster_file = parse_cluster_file(read_text(path), str(path))
    if cluster_file.cluster.name != name:
        raise ConfigError(f"{path}: cluster.name is {cluster_file.cluster.name}; it must be the file's name, {name}")
    return cluster_file


def peek(name_or_path: str) -> Peeked | None:
    """Return the cluster's name, namespace and API host as its file states them, without the models, whose import takes as long as a small
    verb does.

    None: only `load_cluster` can tell, or can say what is wrong with it.
    """
    import yaml

    from lockstep.api.files.yamltext import load_yaml

    path = Path(name_or_path) if is_path(name_or_path) else find_file(name_or_path)
    if path is None:
        return None
    try:
        section = load_yaml(path.read_text(encoding="utf-8"))["cluster"]
        name, api, is_of_hosts = section["name"], section.get("api"), section.get("platform") == HOSTS
        namespace = HOSTS if is_of_hosts else section["namespace"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return None
    plain = (
        isinstance(name, str)
        and isinstance(namespace, str)
        and isinstance(api, str | None)
        and (is_path(name_or_path) or name == name_or_path)
    )
    return Peeked(name, namespace, api, is_of_hosts) if plain else None


def load_hosts(word: str) -> tuple[ClusterFile, str | None]:
    """Return the hosts that --hosts names, and the name of their cluster file in clusters/ if that is what it names.

    `word`: the name or path of a cluster file with `platform: hosts`, a hostfile or another file that `lockstep init hosts --from` reads,
    or hosts as one types them, with commas between them.

    Raises ConfigError for a file of a Kubernetes cluster, one without hosts, and for words that are no hosts.
    """
    from lockstep.api.files.clusterfile import parse_cluster_file

    text = _hosts_text(word, HOSTS)
    if text is None:
        return load_cluster(word), None if is_path(word) else word
    with unseen(f"--hosts {word} as a cluster file") as source:
        return parse_cluster_file(text, source), None


def cluster_of_hosts(word: str, job: str) -> str:
    """Return the cluster by which every verb finds a job's hosts that --hosts names: that of `word` if it is one, else the path of a file
    that is written for the job.

    Raises ConfigError as `load_hosts` does, and where the file can't be written.
    """
    from lockstep.api.files.clusterfile import parse_cluster_file

    name = f"hosts/{job}.yaml"
    path = from_here(state_folder() / name)
    text = _hosts_text(word, f"{HOSTS}-{job}", path)
    if text is None:
        return word
    with unseen(f"--hosts {word} as a cluster file") as source:
        parse_cluster_file(text, source)
    return str(from_here(write_state(name, text)))


@contextmanager
def unseen(source: str) -> Iterator[str]:
    """Name the source of a file that is made of it, and take the file's line numbers out of errors: the reader has not seen the file."""
    try:
        yield source
    except ConfigError as error:
        raise ConfigError(*(re.sub(rf"^{re.escape(source)}:\d+:", f"{source}:", str(line)) for line in error.args)) from None


def _hosts_text(word: str, name: str, path: Path | None = None) -> str | None:
    """Text of a cluster file of this name with the hosts that `word` lists; None: it is a cluster file's name or path."""
    from lockstep.plan.translate.hosts import BETWEEN, cluster_text, from_words, read_machines

    stated = peek(word)
    if stated is not None and stated.is_of_hosts:
        return None
    if stated is not None:
        raise ConfigError(f"{word} describes a Kubernetes cluster, and no hosts: name it by --cluster")
    is_file = is_path(word) or Path(word).is_file()
    machines = read_machines(read_text(Path(word)), word) if is_file else from_words([part.strip() for part in re.split(BETWEEN, word)])
    return cluster_text(name, f"as --hosts {word} names them", machines, None if path is None else str(path))


def file_of(cluster: str) -> str:
    """Return the path of the cluster file to show: the one that was given, else that of its name, of clusters/ if it has none yet."""
    return str(from_here(path_of(cluster)))


def path_of(cluster: str) -> Path:
    """Return the path of the cluster file of this name or path; a name that has no file yet is one of clusters/ where one stands."""
    if is_path(cluster):
        return Path(cluster)
    paths = [folder / f"{cluster}.yaml" for folder in (*cluster_folders(), clusters_here())]
    return next((path for path in paths[:-1] if path.is_file()), paths[-1])


def replace_file(path: Path, text: str) -> None:
    """Write a file anew, whole or not at all, in a folder that is made if need be. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text.encode(), path.stat().st_mode & 0o777 if path.exists() else None)
    except OSError as error:
        raise ConfigError(f"{from_here(path)} can't be written: {error.strerror}") from error


def _unknown_cluster(name: str) -> str:
    from lockstep.api.files.problems import nearest

    names = cluster_names()
    folders = " or ".join(f"{from_here(folder)}/" for folder in cluster_folders())
    close = nearest(name, names)
    hint = f"did you mean {close}?" if close else f"lockstep init cluster {name} begins one"
    hint = f"./{name} names the folder of this machine" if Path(name).is_dir() else hint
    return f"there is no cluster {name} in {folders}: there is {', '.join(names)}; {hint}"
