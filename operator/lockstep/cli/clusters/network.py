"""`lockstep cluster calibrate --pairs` and `lockstep cluster topology`: every pair of nodes on every rail, and what is near what."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.clusters.deploymentplan import Mode
from lockstep.cli.shared.hostsite import fleet_of
from lockstep.cli.shared.jobargs import ContextOption, Form, FormOption, NamespaceOption, OptionalClusterArgument, limit_option
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.plan.cluster.pairs import PairTool, Way
from lockstep.platforms.output import put, put_json, tell

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.job import TrainingJob
    from lockstep.plan.cluster.finding import Finding
    from lockstep.plan.cluster.pairs import PairsMeasured

LineRateOption = Annotated[
    float | None,
    typer.Option(
        "--line-rate", min=0.001, help="Line rate in Gb/s of ports that state none, such as those of a pod network.", show_default=False
    ),
]
RailOption = Annotated[list[str] | None, typer.Option("--rail", help="Measure this rail only. May be repeated.", show_default=False)]
OverOption = Annotated[
    PairTool,
    typer.Option(
        "--over",
        help="Tool that measures: sockets, or rdma, which is ib_write_bw. auto: rdma if it is used and every node has ib_write_bw.",
    ),
]
SecondsOption = Annotated[
    float | None,
    typer.Option(
        "--seconds", min=0.1, max=60, help="Seconds of each measurement. Default: 2, less for many nodes and rails.", show_default=False
    ),
]
NodesOption = Annotated[
    int | None, typer.Option("--nodes", min=2, max=1024, help="Number of nodes. Default: gpus.default_nodes of the cluster file.")
]
LimitOption = Annotated[int | None, limit_option("Seconds to wait in all.")]
FAILED = 1


def way_of(file: ClusterFile, mode: Mode, over: PairTool, seconds: float | None, line_rate: float | None, rails: list[str] | None) -> Way:
    """Choices of the person, and of the cluster file, about a measurement."""
    rdma = file.profile.spec.network.rdma
    tool = PairTool.SOCKETS if over is PairTool.AUTO and (mode is Mode.TCP or not rdma.enabled) else over
    stated = line_rate if line_rate is not None else None if rdma.rate is None else float(rdma.rate)
    return Way(tool, seconds, stated, rdma.gid_index, rails=tuple(rails or ()))


def measure(
    cluster: str, file: ClusterFile, nodes: int | None, mode: Mode, image: str | None, way: Way, namespace: str | None, context: str | None,
    timeout: int | None,
) -> PairsMeasured:  # fmt: skip
    """Measure all pairs of the cluster that was given as `cluster`: of hosts over ssh, else in pods. Raises ConfigError, Failed."""
    if file.hosts is not None:
        fleet = fleet_of(file, cluster, namespace=namespace, context=context, image=image, timeout=timeout)
        from lockstep.platforms.hosts.shortruns import pairs_on_hosts

        with exiting_on_ctrl_c("lockstep: interrupted; nothing of the measurement is left on the hosts"):
            return asyncio.run(pairs_on_hosts(fleet, nodes, way, lambda line: tell(f"lockstep: {line}")))
    from lockstep.cli.shared.target import refuse_other_cluster
    from lockstep.platforms.in_namespace.run import TimeLimit
    from lockstep.platforms.in_namespace.shortruns import pairs_on_cluster

    job, place = job_of(file, nodes, mode, image, "one node has no pair"), namespace or file.cluster.namespace
    refuse_other_cluster(file, context, False)
    with exiting_on_ctrl_c("lockstep: interrupted; the pods of the measurement are removed"):
        return asyncio.run(pairs_on_cluster(job, file.profile, place, context, way, tell, TimeLimit.of(timeout)))


def job_of(file: ClusterFile, nodes: int | None, mode: Mode, image: str | None, why_not: str, most: int | None = None) -> TrainingJob:
    """Return the job in whose pods is measured. Raises ConfigError for one node; `why_not`: what one node lacks."""
    from lockstep.api.shared import FabricMode
    from lockstep.plan.cluster.calibration import sweep_job

    job = sweep_job(file.profile.spec, nodes, FabricMode[mode.name], most)
    if (job.spec.nodes or 0) < 2:
        raise ConfigError(f"gpus.default_nodes of the cluster file is 1, and {why_not}: use --nodes 2")
    return job if image is None else job.model_copy(update={"spec": job.spec.model_copy(update={"image": image})})


def show_pairs(measured: PairsMeasured, fail_below: float | None, output: Form) -> int:
    """Print the measurement and what it says. Return the exit code: 1 where a pair is below the share that was asked for."""
    from lockstep.plan.cluster.pairs import below, judge_pairs
    from lockstep.plan.pages.network import pairs_page, pairs_values

    findings = judge_pairs(measured, fail_below)
    lacking = [] if fail_below is None else below(measured, fail_below)
    if output is Form.JSON:
        values = pairs_values(measured) | {"findings": finding_values(findings)}
        put_json(values | ({} if fail_below is None else {"failBelow": fail_below, "below": len(lacking)}), indent=1)
    else:
        put(*pairs_page(measured), "")
        show_findings(findings, "all pairs are alike")
        if fail_below is not None:
            what = "of the line rate, or of the rail's usual rate where no port states one"
            put(f"{len(lacking)} of {len(measured.rates)} measurements are below {fail_below:.0%} {what}")
    return FAILED if lacking else 0


def show_findings(findings: list[Finding], otherwise: str) -> None:
    for one in findings:
        put(f"{one.outcome.value:8} {one.subject}: {one.message}", f"{'':8} → {one.fix}")
    if not findings:
        put(otherwise)


def finding_values(findings: list[Finding]) -> list[dict[str, str]]:
    return [{"outcome": one.outcome.value, "subject": one.subject, "message": one.message, "fix": one.fix} for one in findings]


def topology(
    cluster: OptionalClusterArgument = "local",
    nodes: NodesOption = None,
    mode: Annotated[Mode, typer.Option("--mode", help="Transport that the pods use.")] = Mode.AUTO,
    image: Annotated[
        str | None, typer.Option("--image", help="Image with python3. Default: the cluster file's image.", show_default=False)
    ] = None,
    over: OverOption = PairTool.AUTO,
    rail: RailOption = None,
    seconds: SecondsOption = None,
    line_rate: LineRateOption = None,
    timeout: LimitOption = None,
    output: FormOption = Form.TEXT,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Show which nodes, GPUs and NICs are near each other.

    It shows the switches between them, too, and which links are slow.

    In pods like a job's, it reads each node's PCI bus, NUMA nodes and nvidia-smi topo -m, and measures all pairs as calibrate --pairs
    does. If you may list nodes, it reads their labels, too. Exit code 0: shown, 1: it failed, 2: it can't run as asked, 130: interrupted.

    Example: lockstep cluster topology barcelona --nodes 4
    """
    from lockstep.cli.shared.target import load
    from lockstep.plan.cluster.pairs import judge_pairs
    from lockstep.plan.pages.network import node_labels, pairs_values, rail_lines, topology_findings, tree

    file = load(cluster)
    way = way_of(file, mode, over, seconds, line_rate, rail)
    measured = measure(cluster, file, nodes, mode, image, way, namespace, context, timeout)
    listed, why_not = ([], "") if file.hosts is not None else asyncio.run(_nodes(context))
    labels = node_labels(listed)
    findings = [*judge_pairs(measured), *topology_findings(measured)]
    if output is Form.JSON:
        put_json(pairs_values(measured, hardware=True) | {"labels": labels, "findings": finding_values(findings)}, indent=1)
        return
    put(*tree(measured.nodes, measured.names, labels))
    put("", *rail_lines(measured), "")
    if why_not:
        put(f"zones, racks and NVLink domains are not known: {why_not}")
    show_findings(findings, "nothing is slow: all pairs of each rail are alike")


async def _nodes(context: str | None) -> tuple[list[dict[str, object]], str]:
    """Nodes of the cluster, and why they can't be seen."""
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.clusters.listings import list_kind

    async with await Cluster.connect(context) as connection:
        listing = await list_kind(connection, "Node")
    return list(listing.items), listing.why_not
