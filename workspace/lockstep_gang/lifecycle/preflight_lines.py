"""A preflight in node 0's log: one line when all is well, else one a finding."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep_gang.contract.preflight import Bandwidth, PreflightReport, Severity
from lockstep_gang.contract.text import number_of


def preflight_lines(result: PreflightReport) -> Iterator[str]:
    errors = sum(finding.severity is Severity.ERROR for finding in result.findings)
    for finding in result.findings:
        yield f"preflight {finding.severity.value.lower()}: {finding.message}: {finding.fix}"
    if result.omitted:
        yield f"preflight: {number_of(result.omitted, 'more finding')} left out"
    made = f"{number_of(len(result.checks), 'check')} on {number_of(result.nodes, 'node')}"
    ended = f"found {number_of(errors, 'error')}" if errors else "passed"
    yield f"preflight: {made} {ended} in {result.milliseconds / 1000:.1f} s{_measured(result.all_reduce)}"


def _measured(bandwidth: Bandwidth | None) -> str:
    if bandwidth is None:
        return ""
    size = f"{bandwidth.bytes // 1024**2} MiB"
    return f", all-reduce of {size} over {bandwidth.ranks} ranks: {bandwidth.bytes_per_second / 1e9:.3g} GB/s busbw"
