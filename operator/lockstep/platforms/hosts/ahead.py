"""Questions to the hosts of a job before its start: could it start now, and what is the model that they have? Nothing is changed there."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from posixpath import join

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.files.clusterfile import ClusterFile
from lockstep.api.job import TrainingJob
from lockstep.plan.ahead.forecast import NOT_OFFLINE, Forecast, RunFacts, forecast, slow_network, with_config
from lockstep.plan.ahead.slownetwork import measured_speed, moves_weights
from lockstep.plan.cluster.finding import Finding
from lockstep.plan.hosts.place import chosen, inputs_of, seats
from lockstep.plan.hosts.planned import NOT_ASKED, HostsAsked, hosts_plan, room_of, with_hosts
from lockstep.plan.render.resolved import Resolved
from lockstep.plan.render.run import trainer_config
from lockstep.plan.translate.trainer import Size
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.start import refuse_running, refuse_unfit
from lockstep.platforms.jobs.planfacts import known_facts
from lockstep.platforms.jobs.resolved import resolve_with_warnings
from lockstep.platforms.output import say
from lockstep.platforms.places.backends import Ahead
from lockstep.platforms.places.orders import HostOptions, Order, PlanWishes
from lockstep.platforms.places.values import NamedPlace
from lockstep.programs import output_of
from lockstep_spec.choices import StorageMode
from lockstep_spec.settings import size_settings

WHOLE_FILE = HostOptions()
MODEL = "spec.training.model.name"
CONFIG = "import os, sys; sys.stdout.buffer.write(open(os.path.expanduser(sys.argv[1]), 'rb').read(1 << 20))"


async def ask_ahead(fleet: Fleet, job: TrainingJob, profile: TrainingCluster) -> HostsAsked:
    """Ask the hosts that a start would take. Raises ConfigError for a job with more nodes than there are hosts."""
    hosts, name = chosen(fleet.cluster, job.spec.nodes), job.metadata.name
    paths = {host.name: inputs_of(job, profile, host) for host in hosts}
    facts, problems = await fleet.look([host.name for host in hosts], job=name, paths=paths, starts=True)
    asked, refusals = [host for host in hosts if host.name in facts], list(problems.values())
    for refuse in (partial(refuse_running, name, facts, fleet.again), partial(refuse_unfit, fleet, job, asked, facts)):
        try:
            refuse()
        except ConfigError as error:
            refusals += map(str, error.args)
    if problems:
        return HostsAsked(facts, tuple(refusals))
    try:
        placed = seats(job, profile, fleet.cluster, fleet.name, facts, str(uuid.uuid4()))
    except ConfigError as error:
        return HostsAsked(facts, (*refusals, *map(str, error.args)))
    return HostsAsked(facts, tuple(refusals), tuple(placed))


class HostsAhead(Ahead):
    """A job on the hosts of a cluster file, which may not answer."""

    def plan(self, where: NamedPlace, order: Order, resolved: Resolved, wishes: PlanWishes) -> tuple[list[Finding], Forecast]:
        """Return a plan without Kubernetes' part of it, by what the hosts say of themselves."""
        fleet = _fleet(*where.of_hosts())
        job, profile, asked = order.job, order.cluster.profile, None
        facts = known_facts(resolved, wishes.model_config, wishes.samples, wishes.tokens_per_second, offline=wishes.offline)
        facts = replace(facts, capacity_source=NOT_ASKED, capacity_fix=NOT_OFFLINE)
        if not wishes.offline:
            asked = asyncio.run(ask_ahead(fleet, job, profile))
            resolved = asked.seats[0].resolved if asked.seats else resolved
            why = "the hosts don't say, because the job can't start there"
            room = room_of(asked, resolved.storage_mode is StorageMode.SHARED)
            facts = replace(with_hosts(facts, asked), capacity_source=why, room_bytes=room)
            facts = asyncio.run(with_config_of_host(facts, fleet, job, profile))
        speed = measured_speed(order.cluster.calibration, order.cluster.pairs, resolved.transport.value)
        estimate = forecast(resolved, replace(facts, speed=speed, refuses_slow_network=True))
        return hosts_plan(resolved, [host.name for host in chosen(fleet.cluster, job.spec.nodes)], asked, estimate), estimate

    def size(self, file: ClusterFile, named: str, nodes: int | None, gpus: int | None) -> tuple[Size, Iterable[str]]:
        """Return the size of a job, as of `Ahead.size`. Hosts that state no GPUs are asked."""
        every = file.its_hosts(named)
        hosts = [host.name for host in chosen(every, nodes)]
        counts = {name: every.gpu_counts[name] if gpus is None else gpus for name in hosts}
        asked = [name for name, count in counts.items() if count is None]
        answers, problems = asyncio.run(_fleet(file, named).look(asked)) if asked else ({}, {})
        problems |= {
            name: f"host {name}: its GPUs are not all known: {facts.gpu_problem}" for name, facts in answers.items() if facts.gpu_problem
        }
        known = [*(count or 0 for count in counts.values()), *(len(facts.gpus) for facts in answers.values())]
        return Size(None if problems else sum(known) or len(hosts), nodes, gpus), problems.values()


def _fleet(file: ClusterFile, named: str) -> Fleet:
    return Fleet(file.its_hosts(named), file.cluster.name, named, tell=say)


async def with_config_of_host(
    facts: RunFacts, fleet: Fleet, job: TrainingJob, profile: TrainingCluster, options: HostOptions = WHOLE_FILE
) -> RunFacts:
    """Return the facts with the model's shape by the config.json that the job's first host has, where it isn't known yet, and that can be
    read.
    """
    if facts.shape is not None or job.spec.training is None:
        return facts
    host = chosen(fleet.cluster, job.spec.nodes, first=options.first, without=options.without)[0]
    folder = next((path for field, path, _ in inputs_of(job, profile, host) if field == MODEL), None)
    if folder is None:
        return facts
    path, place = join(folder, "config.json"), fleet.place(host.name)
    try:
        config = json.loads(await output_of(place, [*place.python, "-I", "-c", CONFIG, path]))
    except (Failed, OSError, ValueError, RecursionError):
        return facts
    return with_config(facts, config, f"{path} on host {host.name}") if isinstance(config, dict) else facts


async def refuse_slow_network(fleet: Fleet, order: Order) -> None:
    """Raise ConfigError where the measured network, by the cluster file, is too slow for the run. Nobody is asked where that can't be."""
    resolved = resolve_with_warnings(order.job, order.cluster, "", quiet=True)
    speed = measured_speed(order.cluster.calibration, order.cluster.pairs, resolved.transport.value)
    if (
        speed is None
        or resolved.nodes == 1
        or resolved.training is None
        or not moves_weights(size_settings(trainer_config(resolved.training)))
    ):
        return
    facts = replace(known_facts(resolved), speed=speed)
    facts = await with_config_of_host(facts, fleet, order.job, order.cluster.profile, order.hosts)
    reason, help_ = slow_network(resolved, facts)
    if reason:
        raise ConfigError(f"{reason}: {help_}; --anyway starts it anyway")
