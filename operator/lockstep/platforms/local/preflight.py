"""Preflight of a job here, as processes: no rank is started, nothing is recorded."""

from __future__ import annotations

import os
import secrets
import tempfile
import uuid
from pathlib import Path

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import Failed
from lockstep.api.job import TrainingJob
from lockstep.plan.render.preflight import alone, ending_with_it, result_in
from lockstep.plan.render.resolve import resolve
from lockstep.platforms.local.agents import run_agents
from lockstep.platforms.local.placement import local_defaults, local_run
from lockstep.platforms.local.run import free_ports, write_private
from lockstep_gang.contract import PreflightReport, run_text


def preflight_local(job: TrainingJob, profile: TrainingCluster, root: Path) -> PreflightReport:
    """Raises ConfigError when the job can't run here, Failed when the agents ended without a result."""
    resolved = resolve(alone(job), profile, local_defaults(root, uid=str(uuid.uuid4())))
    with tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        folder = Path(private)
        write_private(folder / "key", secrets.token_hex(32))
        run = local_run(resolved, folder / "key", free_ports(), os.environ)
        (folder / "run.json").write_text(run_text(ending_with_it(run, run.run_dir)), encoding="utf-8")
        run_agents(folder / "run.json", resolved.nodes, folder, shown=False)
        lines = (folder / "node-0.log").read_text(encoding="utf-8", errors="replace").splitlines()
    result = next(filter(None, map(result_in, lines)), None)
    if result is None:
        raise Failed("preflight ended without a result; the log of node 0 ends with: " + " | ".join(lines[-5:]))
    return result
