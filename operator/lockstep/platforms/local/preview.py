"""What a job would learn of its data, printed by the trainer as a process of its own: no rank is started, nothing is recorded."""

from __future__ import annotations

import os
import subprocess
import tempfile
import uuid
from pathlib import Path

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.render.resolve import resolve
from lockstep.platforms.local.placement import check_inputs, local_defaults, local_run
from lockstep.platforms.local.run import free_ports
from lockstep_gang.contract import run_text


def preview_local(job: TrainingJob, profile: TrainingCluster, root: Path, samples: int) -> int:
    """Print the first `samples` of every source of the data; the trainer's exit code.

    Raises ConfigError before it is started when there is nothing to show. A Ctrl-C ends it, without a traceback of its own.
    """
    if job.spec.training is None:
        raise ConfigError("--preview shows what spec.training would learn of its data, but this job runs a script: leave it out")
    resolved = resolve(job, profile, local_defaults(root, uid=str(uuid.uuid4())))
    check_inputs(resolved)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        run_path = Path(private) / "run.json"
        run = local_run(resolved, Path(private) / "key", free_ports(), os.environ)
        run_path.write_text(run_text(run), encoding="utf-8")
        command = [*run.command, "--run", str(run_path), "--preview", str(samples)]
        return subprocess.run(command, check=False, env={**os.environ, **run.environment}, process_group=0).returncode
