"""A job that failed goes on when it is told to."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from lockstep.cli.main import app
from support.checkout import ROOT
from support.clusters.cluster_jobs import API, Jobs, until

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
FAILS_FIRST = "import os, sys\nsys.exit(3 if os.environ['LOCKSTEP_ATTEMPT'] == '1' else 0)\n"


@pytest.fixture
def scripted(jobs: Jobs) -> Jobs:
    jobs.patch("ConfigMap", "scripts", {"data": {"fails-first.py": FAILS_FIRST}})
    return jobs


def lockstep(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep.cli.main", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_a_failed_job_is_retried_to_its_end_and_remembers_its_failure(scripted: Jobs) -> None:
    scripted.start("again", "fails-first.py")
    scripted.until_condition("again", "Failed", "True", "RanksFailed")
    done = lockstep("retry", "again", "-n", scripted.namespace)
    assert done.returncode == 0, done.stderr
    waited = lockstep("wait", "again", "-n", scripted.namespace, "--timeout", "180")  # the failure before it may still stand in the status
    assert waited.returncode == 0, waited.stdout + waited.stderr
    assert scripted.condition("again", "Failed")["reason"] == "Retried"
    scripted.until_condition("again", "Complete", "True", "Complete")
    status = scripted.job("again")["status"]
    assert (status["attempts"], status["retry"], status["restartsCountTowardsMax"]) == (2, 1, 0)
    assert [(entry["attempt"], entry["cause"]) for entry in status["restartHistory"]] == [(1, "UserCode")]
    scripted.end("again")


def typed(*words: str) -> Result:
    """As `lockstep` does, in this process."""
    return CliRunner().invoke(app, [*words])


def _is_found_beside_jobs(jobs: Jobs, job: Path) -> None:
    """Verbs find the run `left`, though the namespace has TrainingJobs, and neither takes the other's name."""
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "scripts"}}
    jobs.start("beside", suspend=True, podTemplate={"volumes": [volume]})
    where = ("-n", jobs.namespace)
    owner = jobs.get("StatefulSet", "left", "apps/v1")["metadata"]["ownerReferences"][0]["name"]  # type: ignore[index]
    named = typed("get", "-o", "name", *where).output.split()
    assert {f"configmap/{owner}", "trainingjob.lockstep.dev/beside"} <= set(named)
    taken = typed("run", "-f", str(job), *where, "--cluster", "local", "--detach")
    assert "has a run left without the operator" in str(taken.exception)
    other = job.with_name("beside.yaml")
    other.write_text(job.read_text().replace("name: left", "name: beside"))
    there = typed("run", "-f", str(other), "--in-namespace", *where, "--cluster", "local")
    assert "has a TrainingJob beside" in str(there.exception)
    jobs.end("beside")


def test_a_run_that_was_left_with_ctrl_c_is_followed_to_its_end_and_lets_its_nodes_go(jobs: Jobs, kubectl: Kubectl, tmp_path: Path) -> None:
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "scripts"}}
    work = {"nodes": 1, "script": {"path": "/scripts/until_told.py"}, "podTemplate": {"volumes": [volume]}}
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "left"}, "spec": work}))
    words = ["run", "-f", str(job), "--in-namespace", "-n", jobs.namespace, "--cluster", "local"]
    command = [sys.executable, "-m", "lockstep.cli.main", *words]
    heeds_ctrl_c = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 (a shell's background job ignores it)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=heeds_ctrl_c) as first:  # noqa: PLW1509
        assert any("attempt 1 starts" in line for line in first.stdout)
        first.send_signal(signal.SIGINT)
        said = first.stdout.read()
    assert (first.returncode, "Follow it: lockstep logs left" in said) == (130, True), said
    _is_found_beside_jobs(jobs, job)

    assert kubectl("exec", "-n", jobs.namespace, "left-0", "-c", "trainer", "--", "touch", "/tmp/end").returncode == 0  # noqa: S108
    followed = lockstep("logs", "left", "-f", "-n", jobs.namespace, "--cluster", "local")
    assert followed.returncode == 0, followed.stdout + followed.stderr
    until("the keeper lets the nodes go", lambda: not (jobs.get("StatefulSet", "left", "apps/v1") or {"spec": {}})["spec"]["replicas"])
    stateful_set = jobs.get("StatefulSet", "left", "apps/v1")
    assert stateful_set["spec"]["replicas"] == 0
