"""Questions to the hosts of a job before its start: could it start now, and what is the model that they have? Nothing is changed there."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from posixpath import join
from typing import Any

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.job import TrainingJob
from lockstep.plan.hosts.place import chosen, inputs_of, seats
from lockstep.plan.hosts.planned import HostsAsked
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.start import HostOptions, refuse_missing, refuse_running
from lockstep.programs import output_of

MODEL = "spec.training.model.name"


async def ask_ahead(fleet: Fleet, job: TrainingJob, profile: TrainingCluster) -> HostsAsked:
    """Ask the hosts that a start would take. Raises ConfigError for a job with more nodes than there are hosts."""
    hosts, name = chosen(fleet.cluster, job.spec.nodes), job.metadata.name
    paths = {host.name: inputs_of(job, profile, host) for host in hosts}
    facts, problems = await fleet.look([host.name for host in hosts], job=name, paths=paths, starts=True)
    refusals = list(problems.values())
    for refuse in (refuse_running, refuse_missing):
        try:
            refuse(name, facts, fleet.again)
        except ConfigError as error:
            refusals += map(str, error.args)
    if problems:
        return HostsAsked(facts, tuple(refusals))
    try:
        placed = seats(job, profile, fleet.cluster, fleet.name, facts, str(uuid.uuid4()))
    except ConfigError as error:
        return HostsAsked(facts, (*refusals, *map(str, error.args)))
    return HostsAsked(facts, tuple(refusals), tuple(placed))


async def model_config(
    fleet: Fleet, job: TrainingJob, profile: TrainingCluster, options: HostOptions
) -> tuple[Mapping[str, Any], str] | None:
    """Return the config.json of the model that the job's first host has, and where it is. None: the model is no folder of it, or it can't
    be read.
    """
    host = chosen(fleet.cluster, job.spec.nodes, first=options.first, without=options.without)[0]
    folder = next((path for field, path, _ in inputs_of(job, profile, host) if field == MODEL), None)
    if folder is None:
        return None
    path = join(folder, "config.json")
    program = "import os, sys; sys.stdout.buffer.write(open(os.path.expanduser(sys.argv[1]), 'rb').read(1 << 20))"
    place = fleet.place(host.name)
    try:
        text = await output_of(place, [*place.python, "-I", "-c", program, path])
        config = json.loads(text)
    except (Failed, OSError, ValueError, RecursionError):
        return None
    return (config, f"{path} on host {host.name}") if isinstance(config, dict) else None
