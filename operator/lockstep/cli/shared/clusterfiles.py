"""Cluster files: those of clusters/ by their names, any other by its path."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.api.errors import ConfigError
from lockstep.api.names import HOSTS

if TYPE_CHECKING:  # the models take 0.4 s to import, which `lockstep --help` needn't wait for
    from lockstep.api.files.clusterfile import ClusterFile

LOCAL_CLUSTER = "local"
"""Cluster of what runs on this machine, where none is named."""
TEMPLATES = ("template", "template-hosts")


class Peeked(NamedTuple):
    """Section `cluster` of a cluster file, as far as a connection needs it."""

    name: str
    namespace: str
    api: str | None
    """Host of its API server."""
    is_of_hosts: bool = False
    """True for a file with `platform: hosts`."""


def read_text(path: Path) -> str:
    """Return the text of a file; for `-` what is piped in. Raises ConfigError when there is none, or it is no UTF-8."""
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error


class UnknownCluster(ConfigError):
    """No file of clusters/ has this name; the message lists those there are."""


def cluster_names(folder: Path) -> list[str]:
    """The clusters of a folder: its NAME.yaml files but the templates."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem not in TEMPLATES)


def is_path(name_or_path: str) -> bool:
    """Return True for what has a slash in it or ends in .yaml or .yml."""
    return "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))


def load_cluster(name_or_path: str, folder: Path | None = None) -> ClusterFile:
    """Return the cluster file NAME.yaml of `folder` (by default the checkout's clusters/), or the file at a path.

    Raises UnknownCluster for a name without a file, ConfigError with every mistake in it.
    """
    from lockstep.api.files.clusterfile import parse_cluster_file
    from lockstep.cli.shared.checkout import checkout, from_here

    if is_path(name_or_path):
        return parse_cluster_file(read_text(Path(name_or_path)), name_or_path)
    folder = folder or checkout() / "clusters"
    path = from_here(folder / f"{name_or_path}.yaml")
    if not path.is_file():
        raise UnknownCluster(_unknown_cluster(name_or_path, folder))
    cluster_file = parse_cluster_file(read_text(path), str(path))
    if cluster_file.cluster.name != name_or_path:
        raise ConfigError(f"{path}: cluster.name is {cluster_file.cluster.name}; it must be the file's name, {name_or_path}")
    return cluster_file


def peek(name_or_path: str, folder: Path) -> Peeked | None:
    """Return the cluster's name, namespace and API host as its file states them, without the models, whose import takes as long as a small verb does.

    None: only `load_cluster` can tell, or can say what is wrong with it.
    """
    import yaml

    from lockstep.api.files.yamltext import load_yaml

    path = Path(name_or_path) if is_path(name_or_path) else folder / f"{name_or_path}.yaml"
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

    `word`: the name or path of a cluster file with `platform: hosts`, a hostfile or another file that `lockstep cluster import` reads, or hosts as
    one types them, with commas between them.

    Raises ConfigError for a file of a Kubernetes cluster, one without hosts, and for words that are no hosts.
    """
    from lockstep.api.files.clusterfile import parse_cluster_file

    text = _hosts_text(word, HOSTS)
    if text is None:
        return load_cluster(word, _folder()), None if is_path(word) else word
    with unseen(f"--hosts {word} as a cluster file") as source:
        return parse_cluster_file(text, source), None


def cluster_of_hosts(word: str, job: str) -> str:
    """Return the cluster by which every verb finds a job's hosts that --hosts names: that of `word` if it is one, else the path of a file that is written for the job.

    Raises ConfigError as `load_hosts` does, and where the file can't be written.
    """
    from lockstep.api.files.clusterfile import parse_cluster_file
    from lockstep.cli.shared.checkout import from_here, state_folder

    path = from_here(state_folder() / "hosts" / f"{job}.yaml")
    text = _hosts_text(word, f"{HOSTS}-{job}", path)
    if text is None:
        return word
    with unseen(f"--hosts {word} as a cluster file") as source:
        parse_cluster_file(text, source)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}, the cluster file of these hosts, can't be written: {error.strerror}") from error
    return str(path)


@contextmanager
def unseen(source: str) -> Iterator[str]:
    """Name the source of a file that is made of it, and take the file's line numbers out of errors: the reader has not seen the file."""
    try:
        yield source
    except ConfigError as error:
        raise ConfigError(*(re.sub(rf"^{re.escape(source)}:\d+:", f"{source}:", str(line)) for line in error.args)) from None


def _hosts_text(word: str, name: str, path: Path | None = None) -> str | None:
    """Text of a cluster file of this name with the hosts that `word` lists; None: it is a cluster file's name or path."""
    from lockstep.plan.translate.hosts import cluster_text, from_words, read_machines

    stated = peek(word, _folder())
    if stated is not None and stated.is_of_hosts:
        return None
    if stated is not None:
        raise ConfigError(f"{word} describes a Kubernetes cluster, and no hosts: name it by --cluster")
    is_file = is_path(word) or Path(word).is_file()
    machines = read_machines(read_text(Path(word)), word) if is_file else from_words([part.strip() for part in word.split(",")])
    return cluster_text(name, f"as --hosts {word} names them", machines, None if path is None else str(path))


def _folder() -> Path:
    """Folder of cluster files; outside of a checkout the current one."""
    from lockstep.cli.shared.checkout import checkout

    try:
        return checkout() / "clusters"
    except ConfigError:
        return Path()


def file_of(cluster: str) -> str:
    """Path of the cluster file to show: the one that was given, else that of clusters/."""
    return cluster if is_path(cluster) else str(Path("clusters") / f"{cluster}.yaml")


def path_of(cluster: str) -> Path:
    """Path of the cluster file of this name or path. Raises ConfigError where clusters/ can't be found."""
    from lockstep.cli.shared.checkout import checkout

    return Path(cluster) if is_path(cluster) else checkout() / "clusters" / f"{cluster}.yaml"


def replace_file(path: Path, text: str) -> None:
    """Write the file anew, whole or not at all. Raises ConfigError."""
    from lockstep.cli.shared.checkout import from_here

    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.chmod(path.stat().st_mode & 0o777)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{from_here(path)} can't be written: {error.strerror}") from error


def _unknown_cluster(name: str, folder: Path) -> str:
    from lockstep.api.files.problems import nearest
    from lockstep.cli.shared.checkout import from_here

    names, folder = cluster_names(folder), from_here(folder)
    close = nearest(name, names)
    existing = f"it has {', '.join(names)}" if names else "there is none yet"
    hint = f"did you mean {close}?" if close else f"lockstep init cluster {name} begins one"
    return f"there is no cluster {name} in {folder}/: {existing}; {hint}"
