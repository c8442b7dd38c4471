"""Judgments of `doctor -f job.yaml`: do nodes, GPUs, inputs, disks and the measured network fit this job (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.hosts import HostsCluster
from lockstep.api.job import TrainingJob
from lockstep.plan.ahead.forecast import Forecast, RunFacts, forecast
from lockstep.plan.ahead.slownetwork import NetworkSpeed
from lockstep.plan.cluster.finding import Finding, Outcome, failed, fine, warning
from lockstep.plan.hosts.condition import HostLook
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.needs import lacking_inputs
from lockstep.plan.hosts.place import Seat, chosen, seats
from lockstep.plan.hosts.planned import HostsAsked, with_hosts
from lockstep.plan.hosts.reach import HostNetwork
from lockstep_spec.choices import StorageMode
from lockstep_spec.words import decimal_size, named, number_of

SECTIONS = ("adapter", "memory", "network", "ranks", "saves")
"""Sections of a forecast that depend on the hosts."""


def job_findings(
    job: TrainingJob,
    profile: TrainingCluster,
    cluster: HostsCluster,
    looks: Sequence[HostLook],
    network: HostNetwork | None,
    known: RunFacts,
    again: str,
) -> list[Finding]:
    """Judge the job on these hosts. `known`: what files, the hub and the hosts say of the run. `again`: words that name the cluster on a
    command line.
    """
    name = job.metadata.name
    try:
        hosts = chosen(cluster, job.spec.nodes)
    except ConfigError as error:
        return [failed(f"job {name}", str(error), "set nodes in the job file, or list more hosts")]
    by_name = {look.name: look for look in looks}
    answers = {host.name: facts for host in hosts if (facts := by_name[host.name].facts) is not None}
    findings = [failed(", ".join(there), message, command) for there, message, command in lacking_inputs(name, answers, again)]
    running = [host for host, facts in answers.items() if facts.jobs[name].runs]
    if running:
        findings.append(
            warning(f"job {name}", f"it runs on {named('host', running)} already", f"lockstep logs {name} -f {again} follows it")
        )
    if len(answers) < len(hosts):
        return findings  # (a finding names what they lack)
    try:
        placed = seats(job, profile, cluster, cluster.names[0], answers, "check")
    except ConfigError as error:
        return [*findings, *(failed(f"job {name}", str(line), "change the job, or the file of hosts") for line in error.args)]
    ranks = placed[0].run.layout.world_size
    findings.append(fine(f"job {name}", f"{number_of(len(placed), 'node')} with {number_of(ranks, 'rank')} fit now"))
    estimate = forecast(placed[0].resolved, _run_facts(placed, answers, network, known))
    findings += [as_check(one) for one in estimate.findings if one.subject in SECTIONS]
    return [*findings, *_disks(placed, answers, estimate)]


def as_check(planned: Finding) -> Finding:
    """Return a plan's finding as a check judges it: what refuses the job fails, and a note with a fix is a warning."""
    if planned.outcome is Outcome.REFUSED:
        return replace(planned, outcome=Outcome.FAILED)
    return replace(planned, outcome=Outcome.WARNING) if planned.outcome is Outcome.NOTE and planned.fix else planned


def _run_facts(placed: Sequence[Seat], answers: Mapping[str, HostFacts], network: HostNetwork | None, known: RunFacts) -> RunFacts:
    facts = replace(with_hosts(known, HostsAsked(answers, (), tuple(placed))), refuses_slow_network=True)
    facts = replace(facts, capacity_source="the hosts don't say how much memory they have", capacity_fix="")
    rate = None if network is None else network.slowest_gbs
    return replace(facts, speed=NetworkSpeed(rate, "the slowest pair of neighbors just now")) if rate else facts


def _disks(placed: Sequence[Seat], answers: Mapping[str, HostFacts], estimate: Forecast) -> Iterator[Finding]:
    """Compare each disk with the checkpoints that are there at once; where their number isn't known, with two."""
    size = estimate.figures.get("checkpointsMostBytes") or 2 * estimate.figures.get("checkpointBytes", 0)
    if not size:
        return
    shared = placed[0].resolved.storage_mode is StorageMode.SHARED
    each = size if shared else size / len(placed)
    for seat in placed:
        free = answers[seat.host.name].workspace.free
        if free < each:
            message = (
                f"its checkpoints need {decimal_size(each)} there, and {decimal_size(free)} are free in"
                f" {answers[seat.host.name].workspace.path}"
            )
            yield failed(seat.host.name, message, "free some, lower checkpoint.keep, or state a hosts[].workspace on another disk")
