"""Seats of a job on hosts: which host is which node, its address, ports, interface and GPUs, and one run.json for each (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from posixpath import join
from typing import Any

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.hosts import Host, HostsCluster
from lockstep.api.job import TrainingJob
from lockstep.api.names import ANNOTATION_TYPED, DATASETS, WORKSPACE
from lockstep.plan.hosts.facts import HostFacts, HostGpu, session_words, unread_words
from lockstep.plan.hosts.record import Coordinator, JobRecord
from lockstep.plan.hosts.unit import limit_lines, unit_name, unit_text
from lockstep.plan.render.machine import machine_variables, socket_variables
from lockstep.plan.render.resolve import real_text, resolve, unkept_lines
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.render.run import expected_paths, machine_run
from lockstep_gang.contract.run import HostPlace, Run
from lockstep_spec.choices import Balance, Batches, StorageMode
from lockstep_spec.words import named

NAMESPACE = "hosts"
"""Stands for the namespace that jobs on hosts don't have."""
BLOCK = 16
"""Ports of one job: the coordinator's, and those of the rendezvous of its attempts."""
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"
_HOME = "/.home"
"""Stands in for a host's home, so that a path below it is one from the root, as a model's folder must be."""
AGENT, RUN, KEY = "agent.pyz", "run.json", "key"


@dataclass(frozen=True)
class Seat:
    """One node of a job."""

    host: Host
    run: Run
    record: JobRecord
    resolved: Resolved
    unlimited: tuple[str, ...] = ()
    """Fields of the job's own CPU and memory that are not kept on the host."""
    why_unlimited: str = ""
    """Reason, where there are such fields."""

    @property
    def node(self) -> int:
        return self.record.node

    def gpus(self, facts: HostFacts) -> list[HostGpu]:
        """Return the GPUs that it takes, as the host describes them."""
        return [gpu for gpu in facts.gpus if self.run.host is not None and gpu.uuid in self.run.host.claims]


def chosen(cluster: HostsCluster, stated: int | None, *, first: str | None = None, without: Sequence[str] = ()) -> list[Host]:
    """Hosts of a job, in the order of its nodes: those of the file but `without`, `first` before all others.

    `stated`: the job's number of nodes; None: as many as there are hosts. With `without` it may be more than what is left.

    Raises ConfigError for a name that isn't in the file, and for more nodes than hosts.
    """
    for name in (*without, *([first] if first else [])):
        if name not in cluster.names:
            raise ConfigError(f"there is no host {name}: the cluster file has {', '.join(cluster.names)}")
    hosts = sorted((host for host in cluster.hosts if host.name not in without), key=lambda host: host.name != first)
    count = len(hosts) if stated is None else min(stated, len(hosts)) if without else stated
    if not hosts or count > len(hosts):
        raise ConfigError(
            f"the job has {stated} nodes, but there are {len(hosts)} hosts ({', '.join(host.name for host in hosts)}): use --nodes"
            f" {len(hosts)}"
        )
    return hosts[:count]


def seats(
    job: TrainingJob, profile: TrainingCluster, cluster: HostsCluster, name: str, facts: Mapping[str, HostFacts], uid: str
) -> list[Seat]:
    """Every node of the job with its own run.json, which differs in folders and interface, and its own GPUs.

    `facts`: of every host that takes part, in the order of their nodes. `name`: of the cluster file.

    Raises ConfigError with the reason why the job can't run on these hosts.
    """
    hosts = [cluster.host(host) for host in facts]
    _refuse_unread(job.metadata.name, facts)
    for host in hosts:
        if facts[host.name].links and (words := interface_words(host, facts[host.name])):
            raise ConfigError(f"host {host.name}: {words}: correct hosts[].interface")
    counts, profile = _gpu_counts(job, profile, hosts, facts)
    _refuse_without_any_gpu(hosts, facts, counts, job.metadata.annotations.get(ANNOTATION_TYPED, ""))
    taken = [gpus_for(host, facts[host.name], count) for host, count in zip(hosts, counts, strict=True)]
    job = _balanced(job.model_copy(update={"spec": job.spec.model_copy(update={"nodes": len(hosts)})}), taken)
    resolved = [resolve(job, profile, _platform(host, facts[host.name], uid)) for host in hosts]
    addresses = addresses_of(hosts, facts)
    coordinator = free_block(cluster, list(facts.values()))
    micro_batches = tuple(host.micro_batch or 0 for host in hosts)
    runs = [
        machine_run(
            one, python_of(host, facts[host.name]), addresses, coordinator,
            node_ranks=tuple(counts) if len(set(counts)) > 1 else (),
            node_micro_batches=micro_batches if any(micro_batches) else (),
            storage=resolved[0].storage_mode if len(hosts) > 1 else StorageMode.SHARED,
            attempts_before=max(one.jobs[job.metadata.name].highest_attempt for one in facts.values()),
        )
        for host, one in zip(hosts, resolved, strict=True)
    ]  # fmt: skip
    runs = [replace(run, timeouts=replace(run.timeouts, return_seconds=cluster.away_seconds)) for run in runs]
    by_node = enumerate(zip(hosts, taken, resolved, runs, strict=True))
    return [_seat(node, host, facts, name, gpus, one, run) for node, (host, gpus, one, run) in by_node]


def _balanced(job: TrainingJob, taken: Sequence[Sequence[HostGpu]]) -> TrainingJob:
    """The job with balance Measured where it takes GPUs of several kinds, doesn't say how their work is divided, and divides it by
    tokens.
    """
    training = job.spec.training
    kinds = {gpu.name for gpus in taken for gpu in gpus}
    if training is None or len(kinds) < 2 or "balance" in training.optimization.model_fields_set:
        return job
    if training.optimization.batches is Batches.ROWS:
        return job
    optimization = training.optimization.model_copy(update={"balance": Balance.MEASURED})
    training = training.model_copy(update={"optimization": optimization})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})


def _gpu_counts(
    job: TrainingJob, profile: TrainingCluster, hosts: Sequence[Host], facts: Mapping[str, HostFacts]
) -> tuple[list[int], TrainingCluster]:
    """GPUs that the job takes on each host, and the cluster with the largest of these numbers.

    A job that doesn't say takes all that are free. Raises ConfigError where some hosts have GPUs and others none.
    """
    stated = job.spec.gpus_per_node
    if stated is not None:
        return [stated] * len(hosts), profile
    if not job.spec.ranks_per_node:
        for host in hosts:
            _refuse_unknown_gpus(host, facts[host.name])
    counts = [0 if job.spec.ranks_per_node else len(_free(host, facts[host.name])) for host in hosts]
    without = [
        f"{host.name} ({'; '.join(_taken(host, facts[host.name])) or 'it has none'})"
        for host, count in zip(hosts, counts, strict=True)
        if not count
    ]
    if without and any(counts):
        raise ConfigError(
            f"no GPU is free on {', '.join(without)}, but others have some: leave it out with --without, or set spec.gpusPerNode to 0 to"
            " train on CPUs"
        )
    gpus = profile.spec.gpus.model_copy(update={"per_node": max(counts)})
    return counts, profile.model_copy(update={"spec": profile.spec.model_copy(update={"gpus": gpus})})


def _refuse_without_any_gpu(hosts: Sequence[Host], facts: Mapping[str, HostFacts], counts: Sequence[int], typed: str) -> None:
    """Raise ConfigError with the way to train on CPUs, where the job takes GPUs and no host has one."""
    if max(counts) and not any(facts[host.name].gpus or facts[host.name].gpu_problem for host in hosts):
        names, options = named("host", [host.name for host in hosts]), f"--set gpusPerNode=0 --set ranksPerNode={max(counts)}"
        before, script, words = typed.partition(" -- ")
        raise ConfigError(
            f"{names} {'has' if len(hosts) == 1 else 'have'} no GPU, and the job takes {max(counts)} on each: to train on CPUs, add "
            f"{options}" + (f": {before} {options}{script}{words}" if typed else "")
        )


def _refuse_unread(name: str, facts: Mapping[str, HostFacts]) -> None:
    """Raise ConfigError where a job of this name has files that can't be read: how far it is, and whose it is, is not known there."""
    for host, own in facts.items():
        if (there := own.jobs.get(name)) is not None and there.problem:
            raise ConfigError(
                f"{unread_words(host, name, there)}. Mend or move away what it names, under {join(own.state, name)}, or give the job"
                " another name"
            )


def interface_words(host: Host, facts: HostFacts) -> str:
    """Say that the file names an interface which the host doesn't have: its ranks would end, or wait, when they first connect; '' else."""
    if host.interface in (None, LOOPBACK_INTERFACE, *facts.links):
        return ""
    return f"the file names the interface {host.interface}, and the host has {', '.join(facts.links) or 'none'}"


def _refuse_unknown_gpus(host: Host, facts: HostFacts) -> None:
    """Raise ConfigError if the job takes all GPUs of a host and not all are known: it would train on fewer, or on CPUs, and nobody would
    know.
    """
    wanted = len(host.gpus) if isinstance(host.gpus, list) else host.gpus
    if facts.gpu_problem and (wanted is None or len(_free(host, facts)) < wanted):
        raise ConfigError(
            f"host {host.name}: its GPUs are not all known: {facts.gpu_problem}. Mend its driver, or leave the host out with --without; "
            "spec.gpusPerNode takes so many of those that are known, and 0 trains on CPUs"
        )


def _platform(host: Host, facts: HostFacts, uid: str) -> PlatformDefaults:
    return PlatformDefaults(
        absolute(host.workspace, facts.home), absolute(host.datasets, facts.home), namespace=NAMESPACE, uid=uid, image="hosts"
    )


def absolute(path: str, home: str) -> str:
    """Return the path with the host's own home for ~."""
    return home + path.removeprefix("~") if path == "~" or path.startswith("~/") else path


def _seat(
    node: int,
    host: Host,
    facts: Mapping[str, HostFacts],
    cluster: str,
    gpus: Sequence[HostGpu],
    resolved: Resolved,
    run: Run,
) -> Seat:
    own = facts[host.name]
    folder = join(own.state, resolved.name)
    python = python_of(host, own)
    unkept = why_unkept(host, own)
    supervised = bool(unkept)
    claims = HostPlace("" if supervised else unit_name(resolved.name), tuple(gpu.uuid for gpu in gpus))
    run = replace(run, key_file=join(folder, KEY), host=claims)
    interface = host.interface or _interface(own, run.addresses, run.addresses[node])
    environment = variables(resolved, host, interface, gpus)
    if "PATH" in environment:  # (stated, so that it stays as it is, as in pods)
        run = replace(run, environment={**run.environment, "PATH": environment["PATH"]})
    command = (python, "-B", join(folder, AGENT), "--run", join(folder, RUN), "--node", str(node))
    stop_seconds = resolved.job.spec.pod_template.grace_seconds
    unit = unit_text(
        resolved.name, node, command, environment, folder, join(folder, "agent.log"), stop_seconds, limit_lines(resolved.spec.resources)
    )
    record = JobRecord(
        job=stored(resolved, cluster),
        cluster=cluster,
        hosts=tuple(facts),
        ranks=run.layout.counts,
        node=node,
        workspace=resolved.platform.workspace,
        datasets=resolved.platform.datasets,
        supervised=supervised,
        command=command,
        environment=environment,
        coordinator=Coordinator(run.addresses[0], run.coordinator_port),
        unit="" if supervised else unit,
        unkept=unkept,
    )
    unlimited = tuple(field for field in resolved.spec.resources.to_dict() if unkept or field not in own.controllers)
    why = (
        f"units of {own.user} have no control over {' and '.join(unlimited)} there: "
        "as root, set Delegate=cpu memory in user@.service, under control groups of version 2"
    )
    return Seat(host, run, record, resolved, unlimited, unkept or why)


def unlimited_lines(placed: Sequence[Seat]) -> list[str]:
    """Return a warning for each reason why hosts don't keep the job's own CPU and memory."""
    hosts: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for seat in placed:
        hosts.setdefault((seat.unlimited, seat.why_unlimited), []).append(seat.host.name)
    return [
        line
        for (fields, why), names in hosts.items()
        for line in unkept_lines(placed[0].resolved, f"on {named('host', names)}", why, fields)
    ]


def why_unkept(host: Host, facts: HostFacts) -> str:
    """Reason why no unit can keep an agent there, so that a session must, which ends with a reboot; '' where one can.

    Raises ConfigError where a session would end with the connection.
    """
    why, step = session_words(facts)
    words = f"{why}: as root on it: {step}" if why else ""
    if why and facts.kills_processes:
        raise ConfigError(f"host {host.name}: {words}")
    return words


def inputs_of(job: TrainingJob, profile: TrainingCluster, host: Host) -> list[list[str]]:
    """[field, path, `file`, `folder` or `any`] of all that the job reads on a host, with ~ for its home."""
    folders = (absolute(host.workspace, _HOME), absolute(host.datasets, _HOME))
    resolved = resolve(job, profile, PlatformDefaults(*folders, namespace=NAMESPACE, image="hosts"))
    return [
        [
            one.field,
            _from_home(join(folders[0], one.path)),
            "any" if one.or_folder else one.kind.value.lower(),
        ]
        for one in expected_paths(resolved)
    ]


def _from_home(path: str) -> str:
    """Return the path with ~ for the home that stands in for every host's own."""
    return f"~{path.removeprefix(_HOME)}" if path.startswith(f"{_HOME}/") else path


def path_of_job(path: str, facts: HostFacts) -> str:
    """Return the path as a job names it: below /workspace or /datasets, where the host's folders that stand for them have it."""
    full = absolute(path, facts.home)
    for folder, name in ((facts.workspace.path, WORKSPACE), (facts.datasets.path, DATASETS)):
        if full == folder or full.startswith(f"{folder}/"):
            return name + full.removeprefix(folder)
    return full


def stored(resolved: Resolved, cluster: str) -> dict[str, Any]:
    """The job as an API server would have stored it, without what only an operator needs."""
    job = resolved.job.to_dict()
    metadata = {**job["metadata"], "namespace": NAMESPACE, "uid": resolved.uid}
    return {**job, "metadata": metadata, "spec": {**job["spec"], "cluster": cluster, "nodes": resolved.nodes}}


def python_of(host: Host, facts: HostFacts) -> str:
    """Python of the ranks: the one that the file states, else that of the newest environment of `hosts setup`. Raises ConfigError."""
    if host.python:
        return absolute(host.python, facts.home)
    if facts.environment_python:
        return facts.environment_python
    raise ConfigError(f"host {host.name}: it has no Python environment for ranks: lockstep hosts setup makes it, or state hosts[].python")


def addresses_of(hosts: Sequence[Host], facts: Mapping[str, HostFacts]) -> list[str]:
    """Address of each host as the others reach it: stated, else its own on the route to a host whose address is stated.

    Raises ConfigError naming the hosts whose address can't be determined, or is another one's, too.
    """
    if len(hosts) == 1:
        return [hosts[0].address or LOOPBACK]
    stated = [host.address for host in hosts if host.address is not None]
    own = [host.address or next((way.address for peer, way in facts[host.name].routes.items() if peer in stated), None) for host in hosts]
    lost = [host.name for host, address in zip(hosts, own, strict=True) if address is None]
    if lost:
        raise ConfigError(
            f"no address of {', '.join(lost)} is known: state hosts[].address of at least one host, by number, and the others' follow from"
            " their routes to it"
        )
    addresses = [address for address in own if address is not None]
    for address in addresses:
        same = [host.name for host, other in zip(hosts, addresses, strict=True) if other == address]
        if len(same) > 1:
            raise ConfigError(f"hosts {', '.join(same)} have the same address {address}: state hosts[].address of each")
    return addresses


def _interface(facts: HostFacts, addresses: Sequence[str], own: str) -> str:
    ways = (facts.routes[peer] for peer in addresses if peer != own and peer in facts.routes)
    return next((way.interface for way in ways if way.interface), "")


def free_block(cluster: HostsCluster, facts: Sequence[HostFacts]) -> int:
    """First port of a block that nobody listens on, on any host. Raises ConfigError."""
    first, last = cluster.port_range
    taken = frozenset[int]().union(*(one.taken_ports for one in facts), *(one.promised_ports for one in facts))
    for start in range(first, last - BLOCK + 2, BLOCK):
        if taken.isdisjoint(range(start, start + BLOCK)):
            return start
    raise ConfigError(f"no block of {BLOCK} ports from {first} to {last} is free on every host: widen `ports` in the cluster file")


def _allowed(host: Host, facts: HostFacts) -> list[HostGpu]:
    return [gpu for gpu in facts.gpus if not isinstance(host.gpus, list) or str(gpu.index) in host.gpus or gpu.uuid in host.gpus]


def _free(host: Host, facts: HostFacts) -> list[HostGpu]:
    free = [gpu for gpu in _allowed(host, facts) if not gpu.taken]
    return free[: host.gpus] if isinstance(host.gpus, int) else free


def gpus_for(host: Host, facts: HostFacts, count: int) -> tuple[HostGpu, ...]:
    """Return as many free GPUs of the host. Raises ConfigError saying who has those that are missing."""
    free = _free(host, facts)
    if len(free) < count:
        why = (
            "; ".join([*_taken(host, facts), *([facts.gpu_problem] if facts.gpu_problem else [])])
            or f"it has {len(facts.gpus)} in all, and its file allows {len(_allowed(host, facts))}"
        )
        raise ConfigError(f"host {host.name} has {len(free)} free GPUs, and the job takes {count} there: {why}")
    return tuple(free[:count])


def _taken(host: Host, facts: HostFacts) -> list[str]:
    return [f"GPU {gpu.index} {gpu.taken}" for gpu in _allowed(host, facts) if gpu.taken]


def variables(resolved: Resolved, host: Host, interface: str, gpus: Sequence[HostGpu]) -> dict[str, str]:
    """Return the variables of one node: hosts[].env, over hosts[].interface, are the host's own. Raises ConfigError for one that only a
    cluster has.
    """
    missing = [variable.name for variable in resolved.spec.env if variable.value_from is not None]
    if missing:
        raise ConfigError(
            f"spec.env takes {', '.join(missing)} from a Secret or a ConfigMap, which hosts don't have: set it in hosts[].env of the"
            " cluster file"
        )
    sockets = socket_variables(interface) if interface else {}
    own = {
        **(sockets if host.interface else {}),
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus),
        **{variable.name: real_text(variable.value, resolved.platform) for variable in host.env},
    }
    return machine_variables(resolved, sockets, own)
