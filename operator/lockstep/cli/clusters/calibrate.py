"""`lockstep cluster calibrate`: what the network between the nodes really gives: to an all-reduce, or with --pairs from node to node."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.api.shared import FabricMode
from lockstep.cli.clusters.deploymentplan import Mode
from lockstep.cli.shared.clusterfiles import path_of, read_text, replace_file
from lockstep.cli.shared.folders import from_here
from lockstep.cli.shared.jobargs import Form, FormOption, OptionalClusterArgument, TargetOptions, limit_option, on_cluster
from lockstep.cli.shared.target import load
from lockstep.cli.shared.terminal import put_findings, result_of
from lockstep.plan.cluster.calibration import (
    Point,
    Sweep,
    calibration_of,
    pairs_figure,
    replaced,
    suggested_threshold,
    sweep_job,
    with_section,
)
from lockstep.plan.cluster.pairs import PairsMeasured, Way, below, judge_pairs
from lockstep.plan.pages.network import pairs_page, pairs_values
from lockstep.platforms.jobs import shortresults
from lockstep.platforms.output import put, put_json
from lockstep_spec.exits import FAILED
from lockstep_spec.words import binary_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.api.job import TrainingJob


@on_cluster
def calibrate(
    where: TargetOptions,
    cluster: OptionalClusterArgument = "local",
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=2, max=1024, help="Number of nodes. Default: gpus.default_nodes of the cluster file.")
    ] = None,
    mode: Annotated[Mode, typer.Option("--mode", help="Transport between the nodes.")] = Mode.AUTO,
    pairs: Annotated[bool, typer.Option("--pairs", help="Measure every pair of nodes on every rail instead, in both directions.")] = False,
    fail_below: Annotated[
        float | None,
        typer.Option(
            "--fail-below",
            min=0.01,
            max=1,
            help="With --pairs: exit with 1 if a pair is below this share of the line rate.",
            show_default=False,
        ),
    ] = None,
    line_rate: Annotated[
        float | None,
        typer.Option(
            "--line-rate",
            min=0.001,
            help="With --pairs: line rate in Gb/s of ports that state none, such as those of a pod network.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Write the figures into the cluster file.")] = False,
    timeout: Annotated[int | None, limit_option("Seconds to wait in all.")] = None,
    output: FormOption = Form.TEXT,
) -> None:
    """Measure the network between a cluster's nodes.

    An all-reduce by NCCL on GPUs, gloo on CPUs, in place of mpirun and nccl-tests. It takes the GPUs of its nodes for about a minute, in
    pods like a job's; the role admin in one namespace is enough. With --save it writes the bus bandwidths into the file's section
    `calibration`, in decimal GB/s.

    --pairs names the node, cable, rail or switch that is slow. It measures many pairs at once, so 64 nodes take minutes. With --save it
    writes the section `pairs`, from which `lockstep plan` estimates the seconds of a step.

    Exit code 0: measured, 1: it failed, or a pair is below --fail-below, 2: it can't run as asked, 130: interrupted.

    Example: lockstep cluster calibrate barcelona --mode rdma

    Example: lockstep cluster calibrate barcelona --pairs --fail-below 0.8
    """
    file = load(where.verb, cluster)
    if not pairs and (fail_below is not None or line_rate is not None):
        raise ConfigError(f"{'--line-rate' if fail_below is None else '--fail-below'} needs --pairs: add that, or leave it out")
    quiet, path = output is Form.JSON, path_of(cluster)
    job = _job(file, nodes, mode, "one node has no pair" if pairs else "an all-reduce over one node crosses no network")
    runs = where.on(file, cluster).backend().short_runs(file.profile, timeout)
    if pairs:
        way = _way(file, mode, line_rate)
        measured_pairs = result_of(runs, lambda runs: runs.pairs(job, way))
        code = _show_pairs(measured_pairs, fail_below, output)
        if save:
            _store_pairs(path, measured_pairs, file, mode, quiet=quiet)
        raise typer.Exit(code)
    sweep = result_of(runs, lambda runs: shortresults.sweep(runs, job, _printer(quiet=quiet)))
    measured = calibration_of(sweep.points, sweep.transport, sweep.nodes, _today())
    if quiet:
        put_json(measured.to_dict(), indent=1)
    else:
        _suggest(sweep, file)
    if save:
        text, values = with_section(read_text(path), "calibration", replaced(file.calibration, measured)), measured.to_dict()
        _store(path, text, "calibration", values, file, quiet=quiet)
    elif not quiet:
        put(f"Nothing was stored; --save writes it into {from_here(path)}")


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _job(file: ClusterFile, nodes: int | None, mode: Mode, why_not: str) -> TrainingJob:
    """Return the job in whose pods is measured. Raises ConfigError for one node; `why_not`: what one node lacks."""
    job = sweep_job(file.profile.spec, nodes, FabricMode[mode.name])
    if (job.spec.nodes or 0) < 2:
        raise ConfigError(f"the cluster file speaks of one node, and {why_not}: use --nodes 2")
    return job


def _way(file: ClusterFile, mode: Mode, line_rate: float | None) -> Way:
    """Return how pairs are measured, and at which line rate of ports that state none."""
    rdma = file.profile.spec.network.rdma
    stated = line_rate if line_rate is not None else None if rdma.rate is None else float(rdma.rate)
    return Way(rdma.enabled and mode is not Mode.TCP, stated, rdma.gid_index)


def _show_pairs(measured: PairsMeasured, fail_below: float | None, output: Form) -> int:
    """Print the measurement and what it says. Return the exit code: 1 where a pair is below the share that was asked for."""
    findings = judge_pairs(measured, fail_below)
    lacking = [] if fail_below is None else below(measured, fail_below)
    if output is Form.JSON:
        listed = [{"outcome": one.outcome.value, "subject": one.subject, "message": one.message, "fix": one.fix} for one in findings]
        values = pairs_values(measured) | {"findings": listed}
        put_json(values | ({} if fail_below is None else {"failBelow": fail_below, "below": len(lacking)}), indent=1)
    else:
        put(*pairs_page(measured), "")
        put_findings(findings)
        if not findings:
            put("all pairs are alike")
        if fail_below is not None:
            what = "of the line rate, or of the rail's usual rate where no port states one"
            put(f"{len(lacking)} of {len(measured.rates)} measurements are below {fail_below:.0%} {what}")
    return FAILED if lacking else 0


def _printer(*, quiet: bool) -> Callable[[Point], None]:
    """Return a listener that prints the table as its points come, unless it is `quiet`."""
    headed = False

    def hear(point: Point) -> None:
        nonlocal headed
        if not quiet:
            put(*(() if headed else _head(point)), _row(point), flush=True)
            headed = True

    return hear


def _head(point: Point) -> tuple[str, str]:
    return f"all-reduce over {point.ranks} ranks", f"{'SIZE':>10} {'TIME':>12} {'ALGBW GB/s':>12} {'BUSBW GB/s':>12}"


def _row(point: Point) -> str:
    time = f"{point.microseconds} us" if point.microseconds < 10_000 else f"{point.microseconds / 1000:.1f} ms"
    return f"{binary_size(point.bytes):>10} {time:>12} {point.algorithm_gbs:>12.4g} {point.bus_gbs:>12.4g}"


def _suggest(sweep: Sweep, file: ClusterFile) -> None:
    best = max(point.bus_gbs for point in sweep.points)
    put(f"best: {best:.4g} GB/s bus bandwidth over {sweep.transport}, {sweep.nodes} nodes, {sweep.points[0].ranks} ranks")
    network = file.profile.spec.network
    threshold = suggested_threshold(sweep.points, gpus=file.profile.spec.gpus.per_node > 0)
    if network.minimum_busbw is None and threshold is not None and (sweep.transport == "RDMA") == network.rdma.enabled:
        put(f'network.minimum_busbw: "{threshold}" in the cluster file would let preflight stop jobs on nodes that stay below 80% of this')


def _store_pairs(path: Path, measured: PairsMeasured, file: ClusterFile, mode: Mode, *, quiet: bool) -> None:
    """Store what a job gets of the network. Raises Failed where the measurement doesn't say that."""
    if file.profile.spec.network.rdma.enabled and mode is not Mode.TCP and not measured.by_rdma:
        raise Failed(
            "nothing was stored: sockets over RDMA rails don't say what a job gets; use an image with ib_write_bw (perftest), or --mode tcp"
            " for the pod network"
        )
    if any(rate.error for rate in measured.rates):
        raise Failed("nothing was stored: some pairs were not measured")
    figure = pairs_figure(measured, _today())
    _store(path, with_section(read_text(path), "pairs", replaced(file.pairs, figure)), "pairs", figure.to_dict(), file, quiet=quiet)


def _store(path: Path, text: str, section: str, values: object, file: ClusterFile, *, quiet: bool) -> None:
    """Replace the file by this text, which differs in one section. Raises ConfigError if it would differ elsewhere."""
    shown = from_here(path)
    if parse_cluster_file(text, str(shown)).profile != file.profile:
        raise ConfigError(
            f"{shown} can't be changed without changing other keys, so nothing was stored: write its section `{section}` by hand: {values}"
        )
    replace_file(path, text)
    if not quiet:
        put(f"Stored in {shown}, section {section}")
