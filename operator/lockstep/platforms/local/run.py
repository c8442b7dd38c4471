"""Run a job on this machine, one agent a node as a process, look at its nodes by preflight, or show what it would learn of its data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.cluster.pairs import PairsMeasured, Way
from lockstep.plan.reconcile.clocks import Earlier, retried
from lockstep.plan.render.resolve import path_lines, resolve, unkept_lines
from lockstep.plan.render.run import without_ranks
from lockstep.platforms.jobs.agents import Agents, signals, write_run
from lockstep.platforms.jobs.machine import alone, check_inputs, run_dir
from lockstep.platforms.jobs.processes import LocalPlace
from lockstep.platforms.jobs.shortresults import LINES, Hear, Read, Short, ShortEnd, ShortRuns
from lockstep.platforms.local.joined.launch import Launch
from lockstep.platforms.local.placement import local_defaults, local_run, node_devices
from lockstep.platforms.output import tell
from lockstep.platforms.places.orders import LOCAL, Order, lack
from lockstep_machine.gpus import gpu_devices
from lockstep_machine.network import free_ports
from lockstep_spec.exits import INTERRUPTED


def run_local(order: Order, root: Path, earlier: Earlier | None = None) -> int:
    """Run the job to its end, and return its exit code: 0 complete, 1 failed, 130 interrupted.

    Every call is a job of its own, unless it goes on from an `earlier` one that failed; checkpoints are found by the job's name.

    Raises ConfigError before anything is started when the job can't run here.
    """
    job = order.job if earlier is None else retried(order.job, earlier)
    launch = None if order.door is None else Launch(order, order.door, root)
    uid = earlier.uid if earlier is not None else str(uuid.uuid4())
    resolved = resolve(job, order.cluster.profile, local_defaults(root, uid)) if launch is None else launch.resolved
    check_inputs(resolved)
    has = f"ranks take what {'this' if launch is None else 'their'} machine has"
    for line in (*path_lines(resolved), *unkept_lines(resolved, "here", has)):
        tell(line)
    devices = node_devices(resolved, os.environ, gpu_devices()) if launch is None else ()
    folder = run_dir(resolved)
    with alone(folder, job) as held, tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        if launch is not None:
            return asyncio.run(launch.run(Path(private), held))
        run = local_run(resolved, Path(private) / "key", free_ports(2), os.environ)
        return asyncio.run(run_agents(write_run(run, secrets.token_hex(32)), resolved.nodes, folder / "logs", devices))


async def run_agents(run_path: Path, nodes: int, logs: Path, devices: Sequence[str] = (), *, quiet: bool = False) -> int:
    """Run an agent a node to the job's end. Return the exit code. `quiet`: all of their output goes to files, and none saves at Ctrl-C."""
    with signals() as news:
        return await Agents(run_path, news, range(nodes), logs, shown=not quiet, devices=devices).run(saves=not quiet)


class LocalRuns(ShortRuns):
    """Short runs as processes of this machine."""

    left = "the run that was measured is removed"
    on_one_machine = True

    def __init__(self, profile: TrainingCluster, root: Path) -> None:
        self._profile, self._root = profile, root

    async def run(self, kind: Short, job: TrainingJob, hear: Hear, read: Read | None = None) -> ShortEnd:
        """Raises KeyboardInterrupt after Ctrl-C, which ends the ranks at once, too."""
        resolved = resolve(job, self._profile, local_defaults(self._root, uid=str(uuid.uuid4())))
        with contextlib.ExitStack() as stack:
            private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-")))
            folder, devices = private, tuple[str, ...]()
            if kind is Short.STEPS:
                check_inputs(resolved)
                devices = node_devices(resolved, os.environ, gpu_devices())
                folder = run_dir(resolved).with_name(f".measured-{resolved.name}")
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                stack.enter_context(alone(folder))
            run = local_run(resolved, private / "key", free_ports(2), os.environ)
            run = replace(run, run_dir=str(folder)) if kind is Short.STEPS else without_ranks(run, run.run_dir)
            path = write_run(run, secrets.token_hex(32))
            if await run_agents(path, resolved.nodes, folder / "logs", devices, quiet=True) == INTERRUPTED:
                raise KeyboardInterrupt
            lines = (folder / "logs/node-0.log").read_text(encoding="utf-8", errors="replace").splitlines()
            for line in lines:
                hear(line)
            if read is not None:
                await read(LocalPlace(), str(folder))
        return ShortEnd(" | ".join(lines[-LINES:]), resolved.transport.value, resolved.nodes)

    async def pairs(self, job: TrainingJob, way: Way) -> PairsMeasured:
        raise lack(LOCAL, "cluster calibrate --pairs")


def preview_local(job: TrainingJob, profile: TrainingCluster, root: Path, samples: int) -> int:
    """Print the first `samples` of every source of the data, and return the trainer's exit code. No rank is started, nothing is recorded.

    The trainer runs as a process of its own, which a Ctrl-C ends without a traceback. Raises ConfigError when there is nothing to show.
    """
    if job.spec.training is None:
        raise ConfigError("--preview shows what spec.training would learn of its data, but this job runs a script: leave it out")
    resolved = resolve(job, profile, local_defaults(root, uid=str(uuid.uuid4())))
    check_inputs(resolved)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        run = local_run(resolved, Path(private) / "key", free_ports(2), os.environ)
        command = [*run.command, "--run", str(write_run(run, "")), "--preview", str(samples)]
        return subprocess.run(command, check=False, env={**os.environ, **run.environment}, process_group=0).returncode
