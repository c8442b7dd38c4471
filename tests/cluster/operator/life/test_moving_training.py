"""Real ranks that train while their job gets another size, and then another node: what they learn is what an undisturbed run learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from lockstep.api.job import TrainingJob
from lockstep.cli.clusters.demo import demo_folder
from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.kube.exec import PodPlace
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.plan.render.run import training_json
from support.clusters.cluster_demo import demo_files, run_in_pod
from support.clusters.cluster_jobs import API, Jobs, until

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
# At another size FP32 sums are taken in another order: 3e-8 of the loss after 5 steps, and a tenth more with each step, since training is
# chaotic: 1e-4 after 80. So that steps stay few on any machine, they are large ones, and a commit tells of them as soon as there are four.
TOLERANCE = 1e-4
TRAINING: dict[str, Any] = {
    "model": {"name": "/workspace/models/tiny-base"},
    "lora": {"rank": 4, "alpha": 8},
    "precision": "FP32",
    "data": {"path": "/datasets/demo.jsonl", "maxLength": 128},
    "optimization": {"epochs": 1000, "maxSteps": 5000, "learningRate": "1e-3", "microBatchSize": 2, "globalBatchSize": 32},
    "checkpoint": {"everySteps": 4},
    "reportTo": [],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log of the same training as one process of this machine, which has the time that is left over."""
    folder, demo = tmp_path_factory.mktemp("undisturbed"), demo_folder()
    places = {
        "model": {"name": str(demo / "models" / "tiny-base")},
        "data": TRAINING["data"] | {"path": str(demo / "datasets" / "demo.jsonl")},
    }
    job = TrainingJob.model_validate({"metadata": {"name": "alone"}, "spec": {"nodes": 1, "training": TRAINING | places}})
    resolved = resolve(job, load_cluster("local").profile, PlatformDefaults())
    run = {
        "job": {"name": "alone", "namespace": "", "uid": "alone"},
        "runDir": str(folder),
        "training": None if resolved.training is None else training_json(resolved.training),
    }
    (folder / "run.json").write_text(json.dumps(run))
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HOME": str(folder), "PATH": os.environ["PATH"]}
    command = ["nice", "-n", "19", sys.executable, "-m", "lockstep_train", "--run", str(folder / "run.json")]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield folder / "logs" / "train_log.jsonl"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def trains(undisturbed: Path, jobs: Jobs) -> Iterator[tuple[Jobs, PodPlace]]:
    """A job of two real ranks, and a pod that has its files."""
    spec = {"nodes": 2, "training": TRAINING}
    with demo_files(jobs, spec) as files:
        jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "moves"}, "spec": spec})
        try:
            yield jobs, files
        finally:
            jobs.end("moves")
            until("the job's pods are gone", lambda: not jobs.pods("moves"))


def status(jobs: Jobs) -> dict[str, Any]:
    return jobs.job("moves").get("status") or {}


def until_step(jobs: Jobs, attempt: int, after: int) -> None:
    def look() -> bool:
        seen = status(jobs)
        return bool(seen.get("attempts") == attempt and (seen.get("trainer") or {}).get("step", 0) > after)

    until(f"a step after {after} of attempt {attempt}", look, 240)


def until_stopped(jobs: Jobs, attempt: int) -> int:
    """The step at which the attempt was saved and stopped."""
    until(f"the end of attempt {attempt}", lambda: (status(jobs).get("stop") or {}).get("attempt") == attempt, 120)
    stop = status(jobs)["stop"]
    assert (stop["save"], stop["lostSteps"]) == ("Saved", 0), stop
    return int(stop["step"])


@pytest.mark.long
def test_a_training_that_is_scaled_and_then_moved_learns_what_an_undisturbed_one_learns(
    trains: tuple[Jobs, PodPlace], undisturbed: Path, kubectl: Kubectl
) -> None:
    jobs, files = trains
    until_step(jobs, attempt=1, after=0)
    assert kubectl("scale", "-n", jobs.namespace, "trainingjob/moves", "--replicas", "1").returncode == 0
    scaled = until_stopped(jobs, attempt=1)
    until_step(jobs, attempt=2, after=scaled)
    (pod,) = jobs.pods("moves")
    leave_out(jobs, pod["spec"]["nodeName"])
    moved = until_stopped(jobs, attempt=2)
    until_step(jobs, attempt=3, after=moved)
    (elsewhere,) = jobs.pods("moves")
    assert elsewhere["spec"]["nodeName"] != pod["spec"]["nodeName"]
    (term,) = elsewhere["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": [pod["spec"]["nodeName"]]}]
    jobs.change("moves", suspend=True)
    jobs.until_condition("moves", "Suspended", "True", "Suspended")
    last = until_stopped(jobs, attempt=3)
    learned = run_in_pod(files, ["cat", "/workspace/runs/moves/logs/train_log.jsonl"])
    compare(entries(learned), {1: range(1, scaled + 1), 2: range(scaled + 1, moved + 1), 3: range(moved + 1, last + 1)}, undisturbed)


def leave_out(jobs: Jobs, node: str) -> None:
    """As preflight does that finds it bad."""
    found = [{"name": node, "time": "2026-01-01T00:00:00Z", "message": "this node is slow"}]
    client.CustomObjectsApi(jobs.api.client).patch_namespaced_custom_object_status(
        "lockstep.dev", "v1alpha1", jobs.namespace, "trainingjobs", "moves", {"status": {"excludedNodes": found}}
    )


def entries(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.endswith("}")]


def compare(learned: list[dict[str, Any]], steps: dict[int, range], undisturbed: Path) -> None:
    """Each attempt went on where the one before it was saved, every step had the same tokens, and the losses are the same."""
    assert [(e["attempt"], e["step"]) for e in learned] == [(attempt, step) for attempt, made in steps.items() for step in made]
    wanted = until("the undisturbed run gets as far", lambda: enough(undisturbed, len(learned)), 200)
    assert [e["tokens"] for e in learned] == [e["tokens"] for e in wanted]
    assert [e["loss"] for e in learned] == pytest.approx([e["loss"] for e in wanted], rel=TOLERANCE)


def enough(log: Path, count: int) -> list[dict[str, Any]] | None:
    found = entries(log.read_text()) if log.exists() else []
    return found[:count] if len(found) >= count else None
