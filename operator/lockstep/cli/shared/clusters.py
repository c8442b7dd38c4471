"""`lockstep clusters`, and how every verb finds the cluster file that --cluster names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError

if TYPE_CHECKING:  # the models take 0.4 s to import, which `lockstep --help` needn't wait for
    from lockstep.api.files.clusterfile import ClusterFile

TEMPLATE = "template"


def read_text(path: Path) -> str:
    """The text of a file; of `-` what is piped in. Raises ConfigError when there is none, or it is no UTF-8."""
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error


class UnknownCluster(ConfigError):
    """A name that no file of clusters/ has; the message says which there are."""


def cluster_names(folder: Path) -> list[str]:
    """The clusters of a folder: its NAME.yaml files but the template."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem != TEMPLATE)


def load_cluster(name_or_path: str, folder: Path) -> ClusterFile:
    """The cluster file NAME.yaml of `folder`, or the file at a path (which has a slash in it or ends in .yaml or .yml).

    Raises UnknownCluster for a name without a file, ConfigError with every mistake in it.
    """
    from lockstep.api.files.clusterfile import parse_cluster_file
    from lockstep.cli.shared.paths import from_here

    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return parse_cluster_file(read_text(Path(name_or_path)), name_or_path)
    path = from_here(folder / f"{name_or_path}.yaml")
    if not path.is_file():
        raise UnknownCluster(_unknown_cluster(name_or_path, folder))
    found = parse_cluster_file(read_text(path), str(path))
    if found.cluster.name != name_or_path:
        raise ConfigError(f"{path}: cluster.name is {found.cluster.name}; it must be the file's name, {name_or_path}")
    return found


def peek(name_or_path: str, folder: Path) -> tuple[str, str, str | None] | None:
    """The cluster's name, namespace and API host as its file states them, without the models, whose import takes as long as a small verb does.

    None: only `load_cluster` can tell, or can say what is wrong with it.
    """
    import yaml

    from lockstep.api.files.yamltext import load_yaml

    is_path = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    path = Path(name_or_path) if is_path else folder / f"{name_or_path}.yaml"
    try:
        found = load_yaml(path.read_text(encoding="utf-8"))["cluster"]
        name, namespace, api = found["name"], found["namespace"], found.get("api")
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return None
    plain = isinstance(name, str) and isinstance(namespace, str) and isinstance(api, str | None) and (is_path or name == name_or_path)
    return (name, namespace, api) if plain else None


def _unknown_cluster(name: str, folder: Path) -> str:
    from lockstep.api.files.problems import nearest
    from lockstep.cli.shared.paths import from_here

    known, folder = cluster_names(folder), from_here(folder)
    close = nearest(name, known)
    there = f"known are {', '.join(known)}" if known else "there is none yet"
    hint = f"did you mean {close}?" if close else f"lockstep init cluster {name} begins one"
    return f"there is no cluster {name} in {folder}/: {there}; {hint}"


def list_clusters(
    context: Annotated[str | None, typer.Option(help="The context of your kubeconfig that * is told of. Default: the current one.")] = None,
) -> None:
    """The cluster files in clusters/; * is the one that your kubeconfig's context talks to. No cluster is asked.

    Example: lockstep clusters
    """
    from lockstep.cli.shared.paths import checkout
    from lockstep.cli.shared.target import current_server

    print_clusters(checkout() / "clusters", current_server(context))


def print_clusters(folder: Path, server: str | None = None) -> None:
    """A table of the clusters in `folder`; `server`: the API server that is talked to now.

    Raises ConfigError, after the table, for those that can't be read.
    """
    from rich.table import Table

    from lockstep.cli.shared.consoles import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "NAME", "PLATFORM", "NODES", "GPUS", "FABRIC", "STORAGE", "NAMESPACE", "DESCRIPTION"):
        table.add_column(column, overflow="fold")
    mistakes: list[str] = []
    for name in cluster_names(folder):
        try:
            found = load_cluster(name, folder)
            table.add_row(_mark(found, server), *_row(found))
        except ConfigError as error:
            mistakes += map(str, error.args)
            table.add_row("", name, "(has mistakes)")
    console().print(table)
    if mistakes:
        raise ConfigError(*mistakes)


def _mark(found: ClusterFile, server: str | None) -> str:
    from lockstep.cli.shared.target import is_talked_to

    return "*" if server is not None and is_talked_to(found, server) else ""


def _row(found: ClusterFile) -> tuple[str, ...]:
    from lockstep_spec.choices import StorageMode

    spec = found.profile.spec
    storage = (
        f"rwx {spec.storage.class_rwx or ''}" if spec.storage.mode is StorageMode.SHARED else f"per pod {spec.storage.class_rwo or ''}"
    )
    return (
        found.cluster.name,
        spec.platform.value,
        str(len(spec.nodes.gpu_nodes) or "any"),
        f"{spec.gpus.per_node} x {spec.gpus.type or 'GPU'}" if spec.gpus.per_node else "none",
        "RDMA, TCP" if spec.network.rdma.enabled else "TCP",
        storage.strip(),
        found.cluster.namespace,
        found.cluster.description,
    )
