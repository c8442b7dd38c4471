"""Places of a launched job (pure): the machines that may take part, and the run.json of each, which differs in folders, Python, interface and GPUs."""

from __future__ import annotations

import ipaddress
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from posixpath import join

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.render.run import Placement, build_run
from lockstep.platforms.launch.machine import NodeMachine
from lockstep.platforms.local.placement import VISIBLE, shell_variables
from lockstep_gang.contract.run import Run, WhenDone
from lockstep_spec.choices import StorageMode

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


def require_variables(names: Iterable[str], environment: Container[str]) -> None:
    """Raise ConfigError for those that this shell lacks."""
    missing = [name for name in names if name not in environment]
    if missing:
        raise ConfigError(f"spec.env takes {', '.join(missing)} from the cluster, which is not there: set it in this shell instead")


def resolved_there(launched: Launched, machine: NodeMachine) -> Resolved:
    """The job with the folders of this machine. Raises ConfigError."""
    folders = PlatformDefaults(join(machine.workspace, "workspace"), join(machine.workspace, "datasets"), uid=launched.uid, image="hosts")
    return resolve(launched.job, launched.profile, folders)


def refusal(launched: Launched, machine: NodeMachine, first: NodeMachine, peer: str) -> str | None:
    """Reason why this machine can't take part; None: it can. `first` has the launch, `peer` is the address that its connection comes from there."""
    if machine.version != first.version:
        return f"it has lockstep {machine.version}, and the launch on {first.title} lockstep {first.version}: all machines need the same"
    if machine.address != peer:
        return (
            f"its address is {machine.address}, but its connection comes from {peer}: something between translates addresses, and the machines must reach "
            "each other directly"
        )
    if ipaddress.ip_address(machine.address).is_loopback != ipaddress.ip_address(first.address).is_loopback:
        return (
            f"its address {machine.address} and that of the launch, {first.address}, can't reach each other: use --at with another address"
        )
    if (machine.address, machine.workspace) == (first.address, first.workspace):
        return f"it is the machine of the launch, in the same --workspace {machine.workspace}: join on another machine"
    try:
        _devices(resolved_there(launched, machine), machine)
    except ConfigError as error:
        return str(error)
    return None


def run_there(launched: Launched, machines: Sequence[NodeMachine], node: int, key_file: str) -> Run:
    """run.json of a node; `machines`: all of them, by node. Raises ConfigError."""
    machine = machines[node]
    resolved = resolved_there(launched, machine)
    placement = Placement(
        addresses=tuple(one.address for one in machines),
        run_dir=join(resolved.platform.workspace, "runs", resolved.name),
        key_file=key_file,
        when_done=WhenDone.EXIT,
        storage=StorageMode.PER_POD,
        coordinator_port=launched.port + 1,
        master_port=launched.port + 2,
    )
    run = build_run(resolved, placement)
    command = (machine.python, *run.command[1:]) if run.command[0] == "python3" else run.command
    expected = None if run.preflight is None else replace(run.preflight, shm_bytes=None)
    # Ranks find out who shares a folder; only what the job states is required of all.
    stated = launched.job.spec.storage.mode
    return replace(run, command=command, environment=_variables(resolved, machine), preflight=expected, storage=stated)


def _variables(resolved: Resolved, machine: NodeMachine) -> dict[str, str]:
    """Variables of the ranks there: the job's own win over those of that machine's shell, and those over ours."""
    spec = resolved.job.spec
    ours = {"OMP_NUM_THREADS": str(max(1, machine.cpus // resolved.ranks_per_node))}
    if machine.interface and not ipaddress.ip_address(machine.address).is_loopback:
        ours |= {"NCCL_SOCKET_IFNAME": f"={machine.interface}", "GLOO_SOCKET_IFNAME": machine.interface}
    nccl = {name: layered.value for name, layered in resolved.nccl.items()}
    stated = {variable.name: variable.value or "" for variable in spec.env if variable.value_from is None and variable.name != VISIBLE}
    written = {variable.name: variable.value for variable in spec.fabric.nccl_env}
    return {**nccl, **ours, **machine.variables, **written, **stated, VISIBLE: ",".join(_devices(resolved, machine))}


def _devices(resolved: Resolved, machine: NodeMachine) -> tuple[str, ...]:
    """GPUs that the job takes there. Raises ConfigError when they are too few."""
    named = next((variable.value for variable in resolved.job.spec.env if variable.name == VISIBLE and variable.value is not None), None)
    devices = machine.gpus if named is None else tuple(name.strip() for name in named.split(",") if name.strip() not in {"", "-1"})
    if resolved.gpus_per_node > len(devices):
        raise ConfigError(
            f"spec.gpusPerNode is {resolved.gpus_per_node}, and {machine.title} has {len(devices)} GPUs that may be used"
            f"{f' ({VISIBLE} is set there)' if VISIBLE in machine.variables else ''}: lower gpusPerNode"
        )
    return devices[: resolved.gpus_per_node]


def rooms(taken: Iterable[int], nodes: int) -> list[int]:
    """Numbers of the joiners' nodes that nobody has taken, in order."""
    return sorted(set(range(1, nodes)) - set(taken))
