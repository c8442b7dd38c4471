"""A job that failed goes on when it is told to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster_jobs import API, Jobs

CHECKOUT = Path(__file__).resolve().parents[3]
FAILS_FIRST = "import os, sys\nsys.exit(3 if os.environ['LOCKSTEP_ATTEMPT'] == '1' else 0)\n"


@pytest.fixture
def scripted(jobs: Jobs) -> Jobs:
    jobs.patch("ConfigMap", "scripts", {"data": {"fails-first.py": FAILS_FIRST}})
    return jobs


def lockstep(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep.cli.main", *words]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False)


def test_a_failed_job_is_retried_to_its_end_and_remembers_its_failure(scripted: Jobs) -> None:
    scripted.start("again", "fails-first.py")
    scripted.until_condition("again", "Failed", "True", "RanksFailed", 60)
    done = lockstep("retry", "again", "-n", scripted.namespace)
    assert done.returncode == 0, done.stderr
    scripted.until_condition("again", "Failed", "False", "Retried", 30)
    scripted.until_condition("again", "Complete", "True", "Complete", 60)
    status = scripted.job("again")["status"]
    assert (status["attempts"], status["retry"], status["restartsCountTowardsMax"]) == (2, 1, 0)
    assert [(entry["attempt"], entry["cause"]) for entry in status["restartHistory"]] == [(1, "UserCode")]
    refused = lockstep("retry", "again", "-n", scripted.namespace)
    assert (refused.returncode, "is complete: there is nothing to retry" in refused.stderr) == (2, True)
    scripted.end("again")


def test_a_run_without_an_operator_is_retried_as_the_same_job(scripted: Jobs, tmp_path: Path) -> None:
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "scripts"}}
    work = {"nodes": 1, "script": {"path": "/scripts/fails-first.py"}, "podTemplate": {"volumes": [volume]}, "restart": {"maxRestarts": 0}}
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "alone"}, "spec": work}))
    where = ["-f", str(job), "--in-namespace", "-n", scripted.namespace, "--cluster", "local"]
    nothing = lockstep("retry", *where)
    assert (nothing.returncode, "there is no run alone without an operator" in nothing.stderr) == (2, True)
    first = lockstep("run", *where)
    assert first.returncode == 1, first.stdout + first.stderr
    second = lockstep("retry", *where)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "attempt 2 starts" in second.stdout
