"""`lockstep preflight -f job.yaml`: look at the nodes of a job without starting it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.shared.inputs import FileOption, only, read_inputs
from lockstep.cli.shared.jobargs import Form, FormOption, TargetOptions, limit_option, on_site
from lockstep.cli.shared.terminal import console, result_of
from lockstep.platforms.jobs import shortresults
from lockstep.platforms.output import put, put_json
from lockstep_spec.codec import to_json
from lockstep_spec.words import binary_size, number_of

if TYPE_CHECKING:
    from lockstep_gang.contract.preflight import Finding, PreflightReport


@on_site
def preflight(
    where: TargetOptions,
    file: FileOption,
    timeout: Annotated[int | None, limit_option("Seconds for the whole check.")] = None,
    output: FormOption = Form.TEXT,
) -> None:
    """Check a job's nodes, volumes and network, without its ranks.

    Exit code 0: it may start, 1: an error was found.

    On a cluster it runs in pods like the job's own, in the job's namespace; the operator isn't needed. It always removes these pods: at
    once on Ctrl-C and SIGTERM, within two minutes if this command is killed. On hosts it runs over ssh, also beside other jobs, and
    leaves nothing there.

    Example: lockstep preflight -f job.yaml

    Example: lockstep preflight -f job.yaml --cluster lab
    """
    inputs = read_inputs(only(file, "preflight"), where)
    runs = inputs.at(where).backend().short_runs(inputs.cluster.profile, timeout)
    result = result_of(runs, lambda runs: shortresults.preflight(runs, inputs.job), "looking at the nodes")
    _show(result, output is Form.JSON)
    raise typer.Exit(0 if result.ok else 1)


def _show(result: PreflightReport, as_json: bool) -> None:
    if as_json:
        put_json(to_json(result), indent=1)
        return
    _table(result)
    if result.self_test is not None:
        put(result.self_test.words)
    measured = result.all_reduce
    if measured is not None:
        put(
            f"all-reduce of {binary_size(measured.bytes)} over {measured.ranks} ranks: {measured.bytes_per_second / 1e9:.3g} GB/s bus"
            " bandwidth"
        )
    verdict = "passed" if result.ok else "found errors: the job would not start"
    put(f"{number_of(len(result.checks), 'check')} on {number_of(result.nodes, 'node')} {verdict} ({result.milliseconds / 1000:.1f} s)")


def _table(result: PreflightReport) -> None:
    """Every check: ok, or what was found."""
    from rich.table import Table

    table = Table("check", "node", "result", "what was seen", "what to do", box=None)
    for name in result.checks:
        findings = [finding for finding in result.findings if finding.check == name]
        for row in map(_row, findings) if findings else [(name, "", "ok", "", "")]:
            table.add_row(*row)
    for finding in (finding for finding in result.findings if finding.check not in result.checks):
        table.add_row(*_row(finding))
    console().print(table)
    if result.omitted:
        put(f"{number_of(result.omitted, 'more finding')} left out")


def _row(finding: Finding) -> tuple[str, ...]:
    node = "" if finding.node is None else str(finding.node)
    return finding.check, node, finding.severity.value, finding.message, finding.fix
