"""What a person types, as they type it: quickstart, deploy, apply, logs, status, uninstall."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import yaml

from lockstep.api.files.yamltext import dump_yaml
from lockstep.api.job import TrainingJob
from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from support.checkout import ROOT
from support.clusters.cluster_demo import demo_pod
from support.clusters.cluster_jobs import until

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
SAMPLE = "manifests/samples/trainingjob.yaml"
CLAIMS = {"lockstep-python", "ml-datasets", "ml-dev-workspace"}


@pytest.fixture
def lockstep() -> list[str]:
    return [sys.executable, "-m", "lockstep.cli.main"]


@pytest.fixture
def no_demo(kubectl: Kubectl) -> Iterator[None]:
    """No job `demo` before and after."""
    kubectl("delete", "tj", "demo", "-n", "lockstep", "--ignore-not-found")
    yield
    kubectl("delete", "tj", "demo", "-n", "lockstep", "--ignore-not-found")


def run(command: list[str], timeout_seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_seconds)


def interrupted_at(command: list[str], marker: str) -> int:
    """Press Ctrl-C when the output shows `marker`; the exit code."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        for line in process.stdout:
            if marker in line:
                os.killpg(process.pid, signal.SIGINT)
                break
        process.stdout.read()
        return process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.long
@pytest.mark.usefixtures("no_demo")
def test_a_quickstart_after_an_interrupted_one_trains_to_the_end_and_shows_what_was_learned(lockstep: list[str], kubectl: Kubectl) -> None:
    assert interrupted_at([*lockstep, "quickstart"], "Step 3/") == 130
    done = run([*lockstep, "quickstart"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nComplete\n" in done.stdout
    before, after = (float(re.search(rf"eval loss {word}\s+([0-9.]+)", done.stdout)[1]) for word in ("before", "after"))  # type: ignore[index]
    assert after < before - 0.3
    assert "/workspace/runs/demo/adapter" in done.stdout
    assert re.search(r"^What do people get from Mibo\? +\w+ \(wrong\) +Honey \(right\)$", done.stdout, re.MULTILINE)
    assert "kubectl get tj -n lockstep" in done.stdout
    applied = kubectl("apply", "-n", "lockstep", "-f", SAMPLE)
    assert (applied.returncode, applied.stderr) == (0, ""), "kubectl warns of what it hasn't applied itself"


@pytest.mark.usefixtures("no_demo")
def test_deploy_apply_logs_status_and_uninstall_read_well(lockstep: list[str], kubectl: Kubectl) -> None:
    deployed = run([*lockstep, "deploy", "local", "--mode", "tcp", "--no-dev"])
    assert deployed.returncode == 0, deployed.stderr
    assert "\nReady. Next:\n  lockstep init job first --cluster local -o first.yaml" in deployed.stdout
    job = yaml.safe_load((ROOT / SAMPLE).read_text())
    training = job["spec"]["training"]
    training["checkpoint"]["resumeFrom"] = "None"  # an earlier run of the demo is complete
    training["optimization"]["maxSteps"], training["evaluation"] = 6, training["evaluation"] | {"everySteps": 6, "samples": 16}
    with demo_pod(resolve(TrainingJob.model_validate(job), load_cluster("local").profile, PlatformDefaults(namespace="lockstep"))):
        applied = kubectl("apply", "-n", "lockstep", "-f", "-", input=dump_yaml(job))
        assert applied.returncode == 0, applied.stderr
        followed = run([*lockstep, "logs", "demo", "--follow"])
    assert followed.returncode == 0, followed.stderr
    assert re.search(r"^\[rank 0\] Step \d+/\d+ \| Loss: ", followed.stdout, re.MULTILINE)
    assert kubectl("wait", "tj/demo", "-n", "lockstep", "--for=condition=Complete", "--timeout=180s").returncode == 0

    header, row = kubectl("get", "tj", "demo", "-n", "lockstep").stdout.splitlines()
    assert header.split() == ["NAME", "READY", "STEP", "PROGRESS", "RESTARTS", "REASON", "AGE"]
    assert "Complete" in row
    assert "the job is complete" in kubectl("describe", "tj", "demo", "-n", "lockstep").stdout
    kept = run([*lockstep, "logs", "demo"])
    assert "Eval Loss" in kept.stdout

    shown = run([*lockstep, "cluster", "status", "local"])
    assert shown.returncode == 0
    assert "of 2 ready" in shown.stdout
    assert "Complete" in shown.stdout

    refused = run([*lockstep, "cluster", "uninstall", "local", "--yes"])
    assert refused.returncode == 2 and "there are TrainingJobs (lockstep/demo)" in refused.stderr
    removed = run([*lockstep, "cluster", "uninstall", "local", "--jobs", "--yes"])
    assert removed.returncode == 0, removed.stderr
    until("the CRD is gone", lambda: kubectl("get", "crd", "trainingjobs.lockstep.dev").returncode != 0)
    assert kubectl("get", "clusterrole", "lockstep-operator").returncode != 0
    left = yaml.safe_load(kubectl("get", "pvc", "-n", "lockstep", "-o", "yaml").stdout)["items"]
    assert {claim["metadata"]["name"] for claim in left} == CLAIMS
    missing = run([*lockstep, "cluster", "status", "local"])
    assert missing.returncode == 1
    assert "not installed" in missing.stdout


def test_the_wrong_cluster_is_refused_before_anything_is_sent(lockstep: list[str]) -> None:
    done = run([*lockstep, "deploy", "barcelona", "--mode", "rdma"])
    assert done.returncode == 2
    assert "but cluster barcelona is at" in done.stderr
