"""`lockstep cluster calibrate`: what the network between the nodes really gives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.clusters.deploymentplan import Mode
from lockstep.cli.clusters.network import (
    LimitOption,
    LineRateOption,
    NodesOption,
    OverOption,
    RailOption,
    SecondsOption,
    job_of,
    measure,
    show_pairs,
    way_of,
)
from lockstep.cli.shared.hostsite import fleet_of
from lockstep.cli.shared.jobargs import ContextOption, Form, FormOption, NamespaceOption, OptionalClusterArgument
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.plan.cluster.pairs import PairTool
from lockstep.platforms.output import put, put_json, tell
from lockstep_spec.words import binary_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.files.clusterkeys import Calibration
    from lockstep.api.job import TrainingJob
    from lockstep.plan.cluster.calibration import Point, Sweep
    from lockstep.plan.cluster.pairs import PairsMeasured


def calibrate(
    cluster: OptionalClusterArgument = "local",
    nodes: NodesOption = None,
    mode: Annotated[Mode, typer.Option("--mode", help="Transport between the ranks.")] = Mode.AUTO,
    most: Annotated[
        str | None,
        typer.Option("--max-size", help="Size of the largest all-reduce. Default: 1Gi on GPUs, 16Mi on the CPU.", show_default=False),
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Image with torch. Default: the cluster file's image.", show_default=False)
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Measure every pair of nodes on every rail instead, in both directions.")] = False,
    over: OverOption = PairTool.AUTO,
    rail: RailOption = None,
    seconds: SecondsOption = None,
    line_rate: LineRateOption = None,
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
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write the figures into the cluster file.")] = False,
    timeout: LimitOption = None,
    output: FormOption = Form.TEXT,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Measure all-reduce between a cluster's nodes.

    NCCL runs on GPUs, gloo on CPUs. It replaces mpirun and nccl-tests.

    It takes the GPUs of its nodes for about a minute, in pods like a job's; the role admin in one namespace is enough. With --save it
    writes the bus bandwidths into the file's section `calibration`, in decimal GB/s.

    --pairs names the node, cable, rail or switch that is slow. It measures many pairs at once, so 64 nodes take minutes. With --save it
    writes the section `pairs`, from which `lockstep plan` estimates the seconds of a step.

    Exit code 0: measured, 1: it failed, or a pair is below --fail-below, 2: it can't run as asked, 130: interrupted.

    Example: lockstep cluster calibrate barcelona --mode rdma

    Example: lockstep cluster calibrate barcelona --pairs --fail-below 0.8
    """
    from lockstep.cli.shared.clusterfiles import path_of
    from lockstep.cli.shared.folders import from_here
    from lockstep.cli.shared.target import load
    from lockstep.plan.cluster.calibration import calibration_of

    file = load(cluster)
    _refuse_mixed(pairs, most, save, over, rail, seconds, line_rate, fail_below)
    if pairs:
        way = way_of(file, mode, over, seconds, line_rate, rail)
        measured_pairs = measure(cluster, file, nodes, mode, image, way, namespace, context, timeout)
        code = show_pairs(measured_pairs, fail_below, output)
        if save:
            _store_pairs(path_of(cluster), measured_pairs, file, mode, quiet=output is Form.JSON)
        raise typer.Exit(code)
    job = job_of(file, nodes, mode, image, "an all-reduce over one node crosses no network", _bytes(most))
    sweep = _sweep(job, file, cluster, namespace, context, image, timeout, quiet=output is Form.JSON)
    measured = calibration_of(sweep.points, sweep.transport, sweep.nodes, _today())
    if output is Form.JSON:
        put_json(measured.to_dict(), indent=1)
    else:
        _suggest(sweep, file)
    if save:
        _store(path_of(cluster), measured, file, quiet=output is Form.JSON)
    elif output is Form.TEXT:
        put(f"Nothing was stored; --save writes it into {from_here(path_of(cluster))}")


def _refuse_mixed(
    pairs: bool, most: str | None, save: bool, over: PairTool, rail: list[str] | None, seconds: float | None, line_rate: float | None,
    fail_below: float | None,
) -> None:  # fmt: skip
    """Raise ConfigError for an option of the other measurement, which would change nothing."""
    if pairs and save and rail:
        raise ConfigError("--save stores the figure of all rails together: leave out --rail")
    sweep_only = {"--max-size": most is not None}
    pairs_only = {
        "--over": over is not PairTool.AUTO, "--rail": rail, "--seconds": seconds is not None, "--line-rate": line_rate is not None,
        "--fail-below": fail_below is not None,
    }  # fmt: skip
    for option, is_given in (sweep_only if pairs else pairs_only).items():
        if is_given:
            raise ConfigError(
                f"{option} {'has no effect with' if pairs else 'needs'} --pairs: {'leave it out' if pairs else 'add that, or leave it out'}"
            )


def _today() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).date().isoformat()


def _bytes(text: str | None) -> int | None:
    import re

    from lockstep.api.model import QUANTITY_PATTERN
    from lockstep.api.quantity import number

    if text is None:
        return None
    if not re.fullmatch(QUANTITY_PATTERN, text) or number(text) < 4:
        raise ConfigError(f"--max-size {text}: must be a number of bytes such as 64Mi")
    return int(number(text))


def _sweep(
    job: TrainingJob, file: ClusterFile, cluster: str, namespace: str | None, context: str | None, image: str | None, timeout: int | None,
        *,
    quiet: bool,
) -> Sweep:  # fmt: skip
    """Sweep over the hosts, by agents that leave nothing there, or in pods. Raises ConfigError, Failed."""
    if file.hosts is not None:
        from lockstep.platforms.hosts.shortruns import SECONDS, sweep_on_hosts

        fleet = fleet_of(file, cluster, namespace=namespace, context=context, image=image)
        with exiting_on_ctrl_c("lockstep: interrupted; nothing of the sweep is left on the hosts"):
            return asyncio.run(sweep_on_hosts(fleet, job, file.profile, _printer(quiet=quiet), timeout or SECONDS))
    from lockstep.cli.shared.target import refuse_other_cluster
    from lockstep.platforms.in_namespace.run import TimeLimit
    from lockstep.platforms.in_namespace.shortruns import sweep_on_cluster

    refuse_other_cluster(file, context, False)
    place, limit = namespace or file.cluster.namespace, TimeLimit.of(timeout)
    with exiting_on_ctrl_c("lockstep: interrupted; the pods of the sweep are removed"):
        return asyncio.run(sweep_on_cluster(job, file.profile, place, context, _printer(quiet=quiet), limit))


def _printer(*, quiet: bool) -> Callable[[Point | str], None]:
    """Return a listener that prints what is waited for and, unless it is `quiet`, the table as its points come."""
    headed = False

    def hear(heard: Point | str) -> None:
        nonlocal headed
        if isinstance(heard, str):
            tell(heard)
        elif not quiet:
            put(*(() if headed else _head(heard)), _row(heard), flush=True)
            headed = True

    return hear


def _head(point: Point) -> tuple[str, str]:
    return f"all-reduce over {point.ranks} ranks", f"{'SIZE':>10} {'TIME':>12} {'ALGBW GB/s':>12} {'BUSBW GB/s':>12}"


def _row(point: Point) -> str:
    time = f"{point.microseconds} us" if point.microseconds < 10_000 else f"{point.microseconds / 1000:.1f} ms"
    return f"{binary_size(point.bytes):>10} {time:>12} {point.algorithm_gbs:>12.4g} {point.bus_gbs:>12.4g}"


def _suggest(sweep: Sweep, file: ClusterFile) -> None:
    from lockstep.plan.cluster.calibration import suggested_threshold

    best = max(point.bus_gbs for point in sweep.points)
    put(f"best: {best:.4g} GB/s bus bandwidth over {sweep.transport}, {sweep.nodes} nodes, {sweep.points[0].ranks} ranks")
    network = file.profile.spec.network
    threshold = suggested_threshold(sweep.points, gpus=file.profile.spec.gpus.per_node > 0)
    if network.minimum_busbw is None and threshold is not None and (sweep.transport == "RDMA") == network.rdma.enabled:
        put(f'network.minimum_busbw: "{threshold}" in the cluster file would let preflight stop jobs on nodes that stay below 80% of this')


def _store(path: Path, measured: Calibration, file: ClusterFile, *, quiet: bool) -> None:
    from lockstep.cli.shared.clusterfiles import read_text
    from lockstep.plan.cluster.calibration import replaced, with_calibration

    _write(
        path, with_calibration(read_text(path), replaced(file.calibration, measured)), "calibration", measured.to_dict(), file, quiet=quiet
    )


def _store_pairs(path: Path, measured: PairsMeasured, file: ClusterFile, mode: Mode, *, quiet: bool) -> None:
    """Store what a job gets of the network. Raises Failed where the measurement doesn't say that."""
    from lockstep.cli.shared.clusterfiles import read_text
    from lockstep.plan.cluster.calibration import pairs_figure, replaced, with_pairs

    if file.profile.spec.network.rdma.enabled and mode is not Mode.TCP and not measured.by_rdma:
        raise Failed(
            "nothing was stored: sockets over RDMA rails don't say what a job gets; use --over rdma, or --mode tcp for the pod network"
        )
    if any(rate.error for rate in measured.rates):
        raise Failed("nothing was stored: some pairs were not measured")
    figure = pairs_figure(measured, _today())
    _write(path, with_pairs(read_text(path), replaced(file.pairs, figure)), "pairs", figure.to_dict(), file, quiet=quiet)


def _write(path: Path, text: str, section: str, values: object, file: ClusterFile, *, quiet: bool) -> None:
    """Replace the file by this text, which differs in one section. Raises ConfigError if it would differ elsewhere."""
    from lockstep.api.files.clusterfile import parse_cluster_file
    from lockstep.cli.shared.clusterfiles import replace_file
    from lockstep.cli.shared.folders import from_here

    shown = from_here(path)
    if parse_cluster_file(text, str(shown)).profile != file.profile:
        raise ConfigError(
            f"{shown} can't be changed without changing other keys, so nothing was stored: write its section `{section}` by hand: {values}"
        )
    replace_file(path, text)
    if not quiet:
        put(f"Stored in {shown}, section {section}")
