"""`lockstep doctor` of hosts: is every host ready for jobs, do all reach each other, and if not, what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.inputs import Inputs, resolve_inputs
from lockstep.cli.shared.jobargs import Form, TargetOptions
from lockstep.cli.shared.terminal import put_findings, waiting
from lockstep.plan.cluster.finding import Finding, Outcome, failed, unknown
from lockstep.plan.discovery.rails import unused
from lockstep.plan.hosts.check import host_findings, hosts_hardware
from lockstep.plan.hosts.fit import job_findings
from lockstep.plan.hosts.place import inputs_of
from lockstep.plan.hosts.reach import HostNetwork, network_findings
from lockstep.plan.hosts.report import host_rows, host_values, network_values, summary
from lockstep.plan.hosts.setup import environment_findings
from lockstep.plan.hosts.volumes import sharing_findings
from lockstep.platforms.hosts.ahead import with_config_of_host
from lockstep.platforms.hosts.backend import HostsBackend
from lockstep.platforms.hosts.checkup import look_at, measure_between
from lockstep.platforms.hosts.volumes import sharing
from lockstep.platforms.jobs.planfacts import known_facts
from lockstep.platforms.output import put, put_json
from lockstep.programs import ProgramFailed
from lockstep_spec.choices import StorageMode

if TYPE_CHECKING:
    from lockstep.plan.ahead.forecast import RunFacts
    from lockstep.plan.hosts.condition import HostLook
    from lockstep.plan.render.resolved import Resolved
    from lockstep.platforms.hosts.fleet import Fleet


def check_hosts(where: TargetOptions, inputs: Inputs | None, output: Form) -> None:
    """Print what is wrong with the hosts of a cluster file, and what of them doesn't fit a job. Raises typer.Exit if something fails."""
    resolved = None if inputs is None else resolve_inputs(inputs)
    backend = HostsBackend(*where.of_hosts())
    with waiting(f"looking at {len(backend.hosts.hosts)} hosts"):
        checked = asyncio.run(run_check(backend, None if inputs is None or resolved is None else (inputs, resolved)))
    if output is Form.JSON:
        put_json(checked.values(), indent=1)
    else:
        checked.show()
    if checked.fails:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Checked:
    """Everything that was seen and judged."""

    looks: list[HostLook]
    network: HostNetwork | None
    findings: list[Finding]

    @property
    def fails(self) -> bool:
        return any(one.outcome in (Outcome.FAILED, Outcome.REFUSED) for one in self.findings)

    def show(self) -> None:
        """Print a line a host, the findings, and a sentence."""
        rows = host_rows(self.looks, self.network)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            put("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if self.findings:
            put("")
        put_findings(self.findings)
        put("", summary(self.looks, self.findings))

    def values(self) -> dict[str, Any]:
        """The same for programs."""
        findings = [
            {"outcome": one.outcome.value, "subject": one.subject, "message": one.message} | ({"fix": one.fix} if one.fix else {})
            for one in self.findings
        ]
        network = {} if self.network is None else network_values(self.network)
        return {"ok": not self.fails, "hosts": host_values(self.looks, self.network), **network, "findings": findings}


async def run_check(backend: HostsBackend, job: tuple[Inputs, Resolved] | None = None) -> Checked:
    """Look at all hosts and between them, and judge."""
    fleet = backend.fleet()
    known = None if job is None else asyncio.create_task(_known(fleet, *job))
    environments = asyncio.create_task(_environments(fleet, backend))
    hosts = backend.hosts.hosts
    inputs = None if job is None else {host.name: inputs_of(job[0].job, job[0].cluster.profile, host) for host in hosts}
    looks = await look_at(fleet, hosts, "" if job is None else job[1].name, inputs)
    network, problems = None, []
    try:
        network = await measure_between(fleet, looks)
    except ConfigError as error:
        problems.append(failed("addresses", str(error), "state hosts[].address of each host, by number"))
    except ProgramFailed as error:
        problems.append(failed("network", f"it was not measured: {error}", "type it again; if it fails again, look at that host"))
    addresses = {host.name: host.address for host in backend.hosts.hosts if host.address}
    if network is not None:
        addresses |= {network.names[number]: end.address for number, end in network.ends.items()}
    findings = [
        *host_findings(looks, backend.hosts, backend.typed, addresses, None if job is None else job[0].job),
        *unused(backend.profile.spec, hosts_hardware(looks)),
        *await environments,
        *await _sharing(fleet, looks, backend),
        *problems,
    ]
    if network is not None:
        findings += network_findings(network, backend.profile.spec.network.mtu)
    if job is not None and known is not None:
        findings += job_findings(job[0].job, backend.profile, backend.hosts, looks, network, await known, backend.words.again)
    return Checked(looks, network, findings)


async def _environments(fleet: Fleet, backend: HostsBackend) -> list[Finding]:
    """Judge the environments that `hosts setup` made. A host that doesn't answer has a finding already."""
    from lockstep.cli.clusters.hosts import setups_of, wanted_of

    names, stated = [host.name for host in backend.hosts.hosts if not host.python], backend.hosts.environment
    if not names:
        return []
    try:
        wanted = await asyncio.to_thread(wanted_of, stated)
    except ConfigError as error:
        return [unknown("environment", f"whether the hosts have that of {stated.lock}: {error}")]
    setups, _ = await setups_of(fleet, names, stated, wanted)
    return environment_findings(setups, stated.lock, backend.typed)


async def _sharing(fleet: Fleet, looks: Sequence[HostLook], backend: HostsBackend) -> list[Finding]:
    """Judge who can write to its workspace, and which hosts see the same one, by a mark that each writes there for a moment."""
    mode = backend.profile.spec.storage.mode
    folders = {look.name: look.facts.workspace.path for look in looks if look.facts is not None and not look.facts.workspace.problem}
    found = await sharing(fleet, folders, stated=mode is StorageMode.SHARED)
    return list(sharing_findings(found, mode, next(iter(folders.values()), "")))


async def _known(fleet: Fleet, inputs: Inputs, resolved: Resolved) -> RunFacts:
    """Return what files here, the hub and the job's first host say of the run."""
    return await with_config_of_host(await asyncio.to_thread(known_facts, resolved), fleet, inputs.job, inputs.cluster.profile)
