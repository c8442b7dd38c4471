"""`lockstep cluster discover NAME`: a commented cluster file from what the cluster shows."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.jobargs import ContextOption, NamespaceOption

if TYPE_CHECKING:
    from lockstep.plan.clusterfacts import ClusterFacts
    from lockstep.plan.discovery.draft import Entry

STDOUT = "-"


def discover(
    name: Annotated[str, typer.Argument(help="What the cluster is to be called.")],
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="Where to write it; - is the terminal. Default: clusters/NAME.yaml.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Write a commented cluster file: nodes, GPUs, RDMA rails, storage, rights. It only reads, with your rights.

    Every value says where it came from, and what you may not see is marked unknown. Exit code 2: a file of that name is there already.

    Example: lockstep cluster discover mine -n nccl-test
    """
    from lockstep.cli.paths import checkout
    from lockstep.cli.target import use_embedded_cluster

    path = None if output == STDOUT else Path(output) if output else checkout() / "clusters" / f"{name}.yaml"
    _refuse_to_overwrite(path, force)
    _check_name(name)
    use_embedded_cluster(name, context)
    facts = asyncio.run(_look(namespace, context))
    text, entries = _written(name, facts)
    if path is None:
        print(text, end="")
        return
    _write(path, text)
    _tell(name if output is None else str(path), path, facts, entries)


def _refuse_to_overwrite(path: Path | None, force: bool) -> None:
    if path is not None and path.exists() and not force:
        raise ConfigError(f"{path} exists already and is left as it is: name another file with -o, or say --force")


def _check_name(name: str) -> None:
    """A name that can't be is refused before the cluster is asked anything."""
    from lockstep.api.clusterfile import parse_cluster_file

    parse_cluster_file(f"cluster:\n  name: {name!r}\n  namespace: default\n", "NAME")


async def _look(namespace: str | None, context: str | None) -> ClusterFacts:
    from lockstep.platforms.kubernetes.cluster import ApiError, Cluster
    from lockstep.platforms.kubernetes.clusterfacts import read_facts

    async with await Cluster.connect(context) as cluster:
        place, source = namespace or cluster.namespace or "default", "of your context"
        if namespace:
            source = "as you said"
        elif not cluster.namespace:
            source = "your context names none: this is Kubernetes' own default; say another with -n"
        try:
            return await read_facts(cluster, place, source)
        except (ApiError, OSError) as error:
            hint = "is it up? Is --context, or KUBECONFIG, the right one? Has your login run out?"
            raise Failed(f"{cluster.server} doesn't answer as it should: {error}; {hint}") from None


def _written(name: str, facts: ClusterFacts) -> tuple[str, list[Entry]]:
    from lockstep.api.clusterfile import parse_cluster_file
    from lockstep.plan.discovery.file import discovered

    text, entries = discovered(name, facts)
    parse_cluster_file(text, f"what was discovered of {name}")  # nothing is written that the other verbs would refuse
    return text, entries


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


def _tell(name: str, path: Path, facts: ClusterFacts, entries: list[Entry]) -> None:
    print(f"Wrote {path}, by what {facts.server} showed you of namespace {facts.namespace}")
    unseen = [entry for entry in entries if entry.unseen]
    if unseen:
        print(f"{len(unseen)} values are unknown and stand there as comments:", file=sys.stderr)
    for entry in unseen:
        print(f"  {entry.key}: {entry.source.removeprefix('unknown: ')}", file=sys.stderr)
    print(f"Next: read it, then lockstep cluster lint {name}")
