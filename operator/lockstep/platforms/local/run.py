"""Run a job here: `run_local(job, cluster, root)`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.reconcile.clocks import Earlier, retried
from lockstep.plan.render.resolve import resolve
from lockstep.platforms.local.agents import run_agents
from lockstep.platforms.local.placement import LOOPBACK, check_inputs, gpus_here, local_defaults, local_run, node_devices, run_dir
from lockstep_gang.contract import run_text


def run_local(job: TrainingJob, profile: TrainingCluster, root: Path, earlier: Earlier | None = None) -> int:
    """The exit code: 0 complete, 1 failed, 130 interrupted. Every call is a job of its own, unless it goes on from an
    `earlier` one that failed; checkpoints are found by the job's name.

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
        run = local_run(resolved, key_file, free_ports(), os.environ)
        write_private(key_file, secrets.token_hex(32))
        run_path.write_text(run_text(run), encoding="utf-8")
        return run_agents(run_path, resolved.nodes, folder / "logs", devices=devices)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other run of this job on this machine meanwhile. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "local.lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write in {folder} ({error.strerror}): say --workspace FOLDER") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"this job already runs here, in {folder}: wait for it, or stop it with Ctrl-C") from None
        yield


def free_ports() -> tuple[int, int]:
    """Two ports of loopback that nobody listens on now."""
    with socket.socket() as first, socket.socket() as second:
        first.bind((LOOPBACK, 0))
        second.bind((LOOPBACK, 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


def write_private(path: Path, text: str) -> None:
    """A file for this user only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
