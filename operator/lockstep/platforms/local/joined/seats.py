"""Places of a launched job (pure): the machines that may take part, and the run.json of each, which differs in folders, Python, interface
and GPUs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from posixpath import join

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.layers import Layer
from lockstep.plan.render.machine import machine_variables, socket_variables
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.render.run import machine_run
from lockstep.platforms.jobs.machine import shell_variables
from lockstep.platforms.local.joined.machine import KEPT, VISIBLE, NodeMachine, stated_gpus, visible_gpus
from lockstep_gang.contract.run import Run
from lockstep_spec.words import number_of

PORTS = 66
"""Ports of a launch, from the stated one on: joiners', the coordinator's, then those of which every attempt's rendezvous takes one."""


@dataclass(frozen=True)
class Launched:
    """A job that is being launched: the same for all of its machines."""

    job: TrainingJob
    profile: TrainingCluster
    nodes: int
    uid: str
    port: int
    """First of its PORTS."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables that the job takes from the cluster, and so here from the shell of every machine."""
        return shell_variables(self.job.spec)


def devices_there(launched: Launched, machine: NodeMachine) -> tuple[str, ...]:
    """GPUs that the job takes there: as many as it states, else as the cluster does, else all. Raises ConfigError when they are too few."""
    spec = launched.job.spec
    devices = visible_gpus(stated_gpus(spec), machine.gpus)
    wanted = spec.gpus_per_node if spec.gpus_per_node is not None else launched.profile.spec.gpus.per_node or None
    if wanted is None:
        return () if spec.ranks_per_node else devices
    if wanted > len(devices):
        raise ConfigError(
            f"gpusPerNode is {wanted}, and {machine.title} has {number_of(len(devices), 'GPU')} that may be"
            f" used{f' ({VISIBLE} is set there)' if VISIBLE in machine.variables else ''}: lower gpusPerNode, or leave it out to use what"
            " each machine has"
        )
    return devices[:wanted]


def resolved_there(launched: Launched, machine: NodeMachine, gpus: int) -> Resolved:
    """The job with the folders of this machine, and with so many GPUs on the node that has most. Raises ConfigError."""
    folders = PlatformDefaults(join(machine.workspace, "workspace"), join(machine.workspace, "datasets"), uid=launched.uid, image="hosts")
    spec = launched.job.spec.model_copy(update={"gpus_per_node": gpus})
    return resolve(launched.job.model_copy(update={"spec": spec}), launched.profile, folders)


def refusal(launched: Launched, machine: NodeMachine, first: NodeMachine, peer: str) -> str | None:
    """Reason why this machine can't take part; None: it can. `first` has the launch, `peer` is the address that its connection comes from
    there.
    """
    if machine.version != first.version:
        return f"it has lockstep {machine.version}, and the launch on {first.title} lockstep {first.version}: all machines need the same"
    if machine.address != peer:
        return (
            f"its address is {machine.address}, but its connection comes from {peer}: something between translates addresses, and the"
            " machines must reach each other directly"
        )
    if ipaddress.ip_address(machine.address).is_loopback != ipaddress.ip_address(first.address).is_loopback:
        return (
            f"its address {machine.address} and that of the launch, {first.address}, can't reach each other: use --at with another address"
        )
    if (machine.address, machine.workspace) == (first.address, first.workspace):
        return f"it is the machine of the launch, in the same folder {machine.workspace}: join on another machine"
    return _gpu_refusal(launched, machine, first)


def _gpu_refusal(launched: Launched, machine: NodeMachine, first: NodeMachine) -> str | None:
    try:
        has, needs = bool(devices_there(launched, machine)), bool(devices_there(launched, first))
    except ConfigError as error:
        return str(error)
    if has == needs:
        return None
    bare, other = (machine, first) if needs else (first, machine)
    return f"{bare.title} has no GPU that may be used, and {other.title} has: state gpusPerNode: 0 in the job to train on CPUs"


def run_there(launched: Launched, machines: Sequence[NodeMachine], node: int, attempts_before: int = 0) -> Run:
    """run.json of a node, but for the key's file; `machines`: all of them, by node. `attempts_before`: highest attempt of the job on any of
    them.

    Raises ConfigError.
    """
    machine = machines[node]
    devices = [devices_there(launched, one) for one in machines]
    counts = tuple(map(len, devices))
    resolved = resolved_there(launched, machine, max(counts))
    ranks = counts if max(counts) else (resolved.ranks_per_node,) * len(machines)
    run = machine_run(
        resolved,
        machine.python,
        [one.address for one in machines],
        launched.port + 1,
        environment={**_variables(resolved, machine), VISIBLE: ",".join(devices[node])},
        storage=launched.job.spec.storage.mode,  # ranks find out who shares a folder; only what the job states is required of all
        node_ranks=ranks if len(set(ranks)) > 1 else (),
        attempts_before=attempts_before,
    )
    expected = None if run.preflight is None else replace(run.preflight, own_variables=(*KEPT, "OMP_NUM_THREADS"))
    return replace(run, preflight=expected)


def _variables(resolved: Resolved, machine: NodeMachine) -> dict[str, str]:
    """Return the variables of the ranks there; those of that machine's shell are its own. On the loopback no other interface is stated."""
    is_loopback = ipaddress.ip_address(machine.address).is_loopback
    found = {} if is_loopback or not machine.interface else socket_variables(machine.interface)
    nccl = {name: value for name, value in resolved.nccl.items() if not is_loopback or name not in KEPT or value.layer is Layer.JOB}
    return machine_variables(replace(resolved, nccl=nccl), found, machine.variables)


def rooms(taken: Iterable[int], nodes: int) -> list[int]:
    """Numbers of the joiners' nodes that nobody has taken, in order."""
    return sorted(set(range(1, nodes)) - set(taken))
