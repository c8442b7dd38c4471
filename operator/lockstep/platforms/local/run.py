"""Run a job on this machine, look at its nodes by preflight, or show what it would learn of its data."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.job import TrainingJob
from lockstep.plan.reconcile.clocks import Earlier, retried
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.run import result_in, with_preflight, without_ranks
from lockstep.platforms.local.agents import run_agents
from lockstep.platforms.local.placement import LOOPBACK, check_inputs, gpus_here, local_defaults, local_run, node_devices, run_dir
from lockstep_gang.contract.preflight import PreflightReport
from lockstep_gang.contract.run import run_text


def run_local(job: TrainingJob, profile: TrainingCluster, root: Path, earlier: Earlier | None = None) -> int:
    """Run the job to its end, and return its exit code: 0 complete, 1 failed, 130 interrupted.

    Every call is a job of its own, unless it goes on from an `earlier` one that failed; checkpoints are found by the job's name.

    Raises ConfigError before anything is started when the job can't run here.
    """
    if earlier is not None:
        job = retried(job, earlier)
    resolved = resolve(job, profile, local_defaults(root, uid=earlier.uid if earlier is not None else str(uuid.uuid4())))
    check_inputs(resolved)
    devices = node_devices(resolved, os.environ, gpus_here())
    folder = run_dir(resolved)
    with _alone(folder), tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        key_file, run_path = Path(private) / "key", Path(private) / "run.json"
        run = local_run(resolved, key_file, _free_ports(), os.environ)
        _write_private(key_file, secrets.token_hex(32))
        run_path.write_text(run_text(run), encoding="utf-8")
        return run_agents(run_path, resolved.nodes, folder / "logs", devices=devices)


def preflight_local(job: TrainingJob, profile: TrainingCluster, root: Path) -> PreflightReport:
    """Look at the nodes as processes: no rank is started, nothing is recorded.

    Raises ConfigError when the job can't run here, Failed when the agents ended without a result.
    """
    resolved = resolve(with_preflight(job), profile, local_defaults(root, uid=str(uuid.uuid4())))
    with tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        folder = Path(private)
        _write_private(folder / "key", secrets.token_hex(32))
        run = local_run(resolved, folder / "key", _free_ports(), os.environ)
        (folder / "run.json").write_text(run_text(without_ranks(run, run.run_dir)), encoding="utf-8")
        run_agents(folder / "run.json", resolved.nodes, folder, shown=False)
        lines = (folder / "node-0.log").read_text(encoding="utf-8", errors="replace").splitlines()
    result = next(filter(None, map(result_in, lines)), None)
    if result is None:
        raise Failed("preflight ended without a result; the log of node 0 ends with: " + " | ".join(lines[-5:]))
    return result


def preview_local(job: TrainingJob, profile: TrainingCluster, root: Path, samples: int) -> int:
    """Print the first `samples` of every source of the data, and return the trainer's exit code. No rank is started, nothing is recorded.

    The trainer runs as a process of its own, which a Ctrl-C ends without a traceback. Raises ConfigError when there is nothing to show.
    """
    if job.spec.training is None:
        raise ConfigError("--preview shows what spec.training would learn of its data, but this job runs a script: leave it out")
    resolved = resolve(job, profile, local_defaults(root, uid=str(uuid.uuid4())))
    check_inputs(resolved)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        run_path = Path(private) / "run.json"
        run = local_run(resolved, Path(private) / "key", _free_ports(), os.environ)
        run_path.write_text(run_text(run), encoding="utf-8")
        command = [*run.command, "--run", str(run_path), "--preview", str(samples)]
        return subprocess.run(command, check=False, env={**os.environ, **run.environment}, process_group=0).returncode


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other runs of this job off this machine meanwhile. Raises ConfigError when there is one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "local.lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write in {folder} ({error.strerror}): use --workspace FOLDER") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"this job already runs here, in {folder}: wait for it, or stop it with Ctrl-C") from None
        yield


def _free_ports() -> tuple[int, int]:
    """Two ports of loopback that nobody listens on now."""
    with socket.socket() as first, socket.socket() as second:
        first.bind((LOOPBACK, 0))
        second.bind((LOOPBACK, 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
