"""`lockstep cluster discover NAME`: a commented cluster file from what the cluster shows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.cli.shared.clusterfiles import path_of, peek, replace_file
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.cli.shared.target import aim_at
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.discovery.file import discovered
from lockstep.plan.discovery.rails import cluster_hardware, unused
from lockstep.platforms.clusters.facts import discover_facts
from lockstep.platforms.kubernetes.probe import probe_nodes
from lockstep.platforms.output import put, put_text, tell

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingClusterSpec
    from lockstep.kube.aim import Connections
    from lockstep.plan.cluster.facts import ClusterFacts, ProbeFacts
    from lockstep.plan.discovery.draft import Entry

STDOUT = "-"


@acts_on("namespace", "context")
def discover(
    where: TargetOptions,
    name: Annotated[str, typer.Argument(help="Name for the cluster.")],
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="File to write; - for the terminal. Default: clusters/NAME.yaml.", show_default=False),
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(
            "--probe",
            metavar="IMAGE",
            help="Also look inside each node, from a short-lived pod of this image. It needs Python.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a cluster file by looking at the cluster.

    It looks for nodes, GPUs, RDMA rails, storage and rights. Without --probe it only reads, with your rights.

    Every value has its source beside it, and what you may not see is marked unknown. Exit code 2: the file already exists.

    Example: lockstep cluster discover mine -n nccl-test
    """
    path = None if output == STDOUT else Path(output) if output else path_of(name)
    parse_cluster_file(f"cluster:\n  name: {name!r}\n  namespace: default\n", "NAME")  # one that can't be is refused first
    stated = peek(name)
    aim_at(where.verb, name, None, checked=False, is_of_hosts=stated is not None and stated.is_of_hosts)
    if path is not None and path.exists():
        raise ConfigError(f"{path} already exists; name another file with -o, or remove it")
    with exiting_on_ctrl_c("lockstep: interrupted; nothing was written, and no pod is left"):
        facts = asyncio.run(_look(where.namespace, where.connections, probe))
    text, entries = discovered(name, facts)
    spec = parse_cluster_file(text, f"what was discovered of {name}").profile.spec  # nothing is written that other verbs would refuse
    if path is None:
        return put_text(text)
    replace_file(path, text)
    _tell(name if output is None else str(path), path, facts, entries, spec)


async def _look(namespace: str | None, connections: Connections, image: str | None) -> ClusterFacts:
    async with await Cluster.connect(connections) as cluster:
        place, source = namespace or cluster.namespace or "default", "from your context"
        if namespace:
            source = "from --namespace"
        elif not cluster.namespace:
            source = "Kubernetes' default, since your context names none; -n names another"
        try:
            facts = await discover_facts(cluster, place, source)
            return facts if image is None else replace(facts, probes=await probe_nodes(cluster, facts, image))
        except (ApiError, OSError) as error:
            hint = "is it up? Is --context, or KUBECONFIG, the right one? Has your login run out?"
            raise Failed(f"{cluster.server} doesn't answer as it should: {error}; {hint}") from None


def _tell(name: str, path: Path, facts: ClusterFacts, entries: list[Entry], spec: TrainingClusterSpec) -> None:
    put(f"Wrote {path} from what {facts.server} shows you of namespace {facts.namespace}")
    for probe in facts.probes:
        put(f"  node {probe.node}: {_seen_inside(probe)}")
    unseen = [entry for entry in entries if entry.unseen]
    if unseen:
        tell(f"{len(unseen)} values are unknown and left as comments:")
    for entry in unseen:
        tell(f"  {entry.key}: {entry.source.removeprefix('unknown: ')}")
    for finding in unused(spec, cluster_hardware(facts, spec)):
        put(f"  {finding.subject}: {finding.message}")
    put(f"Next: read it, then lockstep cluster lint {name}")


def _seen_inside(probe: ProbeFacts) -> str:
    if probe.error:
        return f"the probe saw nothing: {probe.error}"
    hcas = ", ".join(f"{name} ({state})" for name, state in probe.hcas.items()) or "none"
    interfaces = ", ".join(f"{name} MTU {mtu}" for name, mtu in probe.interfaces.items())
    memlock = "unlimited" if probe.memlock_bytes is None else f"{probe.memlock_bytes // 1024} KiB"
    return f"{probe.gpus} GPUs; RDMA devices {hcas}; {interfaces}; lockable memory {memlock}; CapEff {probe.capabilities}"
