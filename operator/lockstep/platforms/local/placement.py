"""Place of a resolved job on this machine: folders for the volumes, loopback for the network, this Python for the image."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.api.job import PreflightMode
from lockstep.plan.render.machine import machine_variables
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.render.run import machine_run
from lockstep.platforms.jobs.machine import shell_variables
from lockstep.platforms.local.joined.machine import VISIBLE, require_variables, stated_gpus, visible_gpus
from lockstep_gang.contract.preflight import AllReduce
from lockstep_gang.contract.run import Run

LOOPBACK = "127.0.0.1"


def local_defaults(root: Path, uid: str) -> PlatformDefaults:
    """`root`/workspace stands for /workspace and `root`/datasets for /datasets."""
    folder = root.resolve()
    return PlatformDefaults(str(folder / "workspace"), str(folder / "datasets"), uid=uid, image="local")


def local_run(resolved: Resolved, key_file: Path, ports: tuple[int, int], inherited: Mapping[str, str]) -> Run:
    """run.json for processes here; `ports` are the coordinator's and the first of the ranks'.

    Raises ConfigError for a variable that only a cluster could look up.
    """
    run = machine_run(
        resolved, sys.executable, (LOOPBACK,) * resolved.nodes, ports[0],
        key_file=str(key_file), master_port=ports[1], environment=variables_here(resolved, inherited),
    )  # fmt: skip
    if run.preflight is None:
        return run
    measured = run.preflight.all_reduce is not None and resolved.job.spec.preflight is PreflightMode.FULL
    return replace(run, preflight=replace(run.preflight, rdma=None, all_reduce=AllReduce() if measured else None))


def variables_here(resolved: Resolved, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the job's own variables, but which GPUs: each node has its own. The cluster's are for its image and its network, not for this
    machine.
    """
    require_variables(shell_variables(resolved.spec), inherited, " with --local")
    variables = machine_variables(replace(resolved, nccl={}))
    return {name: value for name, value in variables.items() if name != VISIBLE}


def node_devices(resolved: Resolved, inherited: Mapping[str, str], present: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each node: the GPUs of this machine, divided. None for a job without GPUs, as in a pod. `present`: how many
    there are.

    Those that spec.env or this shell names in CUDA_VISIBLE_DEVICES are the ones to divide. Raises ConfigError when they are too few.
    """
    stated = stated_gpus(resolved.job.spec)
    named = inherited.get(VISIBLE) if stated is None else stated
    devices = visible_gpus(named, map(str, range(present)))
    nodes, each = resolved.nodes, resolved.gpus_per_node
    if nodes * each > len(devices):
        available = f"{VISIBLE} names {len(devices)}" if named is not None else f"this machine has {len(devices)}"
        raise ConfigError(
            f"spec.gpusPerNode is {each}, so {nodes} nodes need {nodes * each} GPUs, and {available}: lower gpusPerNode or --nodes (both"
            " run on this machine)"
        )
    return tuple(",".join(devices[node * each : (node + 1) * each]) for node in range(nodes))
