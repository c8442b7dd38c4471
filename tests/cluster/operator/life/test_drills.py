"""`make drills`: faults done to one training job through the command line, what each costs, and that nothing is lost in the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from lockstep.cli.clusters.demo import demo_folder
from lockstep.devcluster.host.layout import default_layout
from lockstep.kube.cluster import Client
from lockstep.kube.exec import PodPlace
from lockstep.platforms.files.reader import stateful_set_before_start
from support.checkout import ROOT
from support.clusters.cluster_demo import demo_pod, resolved_job, run_in_pod
from support.clusters.cluster_jobs import API, Jobs, kubeconfig_of, until
from support.clusters.small_volume import small_volume

STEP_LIMIT_SECONDS = 10
DISK_BYTES = 400 << 20  # preflight wants 256 MiB of it free before every attempt
SPEC: dict[str, Any] = {
    "nodes": 2,
    "training": {
        "model": {"name": "/workspace/models/tiny-base"},
        "lora": {"rank": 4, "alpha": 8},
        "precision": "FP32",
        "zeroStage": "Stage2",
        "data": {"path": "/datasets/demo.jsonl", "maxLength": 128},
        "optimization": {"epochs": 1000, "maxSteps": 5000, "learningRate": "1e-3", "microBatchSize": 2, "globalBatchSize": 8},
        "checkpoint": {"everySteps": 10, "keep": 1000},
        "reportTo": [],
    },
    "restart": {"maxRestarts": 10},
    "hangTimeouts": {"stepSeconds": STEP_LIMIT_SECONDS},
}


# Run where a run's folder is: the loss of every step, and the digests of a commit's shards.
LEARNED = """
import glob, hashlib, json, os, sys
folder, step = sys.argv[1:]
losses = [(entry["step"], entry["loss"]) for entry in map(json.loads, open(folder + "/logs/train_log.jsonl"))]
commits = [path for path in glob.glob(f"{folder}/checkpoints/step-{step}.a*") if os.path.exists(path + "/manifest.json")]
newest = max(commits, key=lambda path: int(path.rpartition(".a")[2]), default=folder)
shards = {os.path.basename(path): hashlib.sha256(open(path, "rb").read()).hexdigest() for path in glob.glob(newest + "/shard-*")}
print(json.dumps({"losses": losses, "shards": shards}))
"""


def committed(jobs: Jobs) -> int:
    return int((jobs.job("drilled").get("status") or {}).get("checkpoint", {}).get("lastCommittedStep", 0))


def lockstep(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep.cli.main", *arguments]
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, check=False)


def drill(jobs: Jobs, fault: str, *arguments: str, job: str = "drilled") -> dict[str, Any]:
    """What the command reports."""
    done = lockstep("drill", fault, "--job", job, "-n", jobs.namespace, "--yes", "--timeout", "170", "-o", "json", *arguments)
    assert done.returncode == 0, done.stderr
    print(done.stderr, done.stdout)
    return json.loads(done.stdout)


def drill_training(jobs: Jobs, fault: str, *arguments: str) -> dict[str, Any]:
    """The job must be well before it, and have a new commit, so that the backoff is again that of a first failure."""
    jobs.until_condition("drilled", "Progressing", "True", "Running")
    before = committed(jobs)
    until("a new commit", lambda: committed(jobs) > before)
    return drill(jobs, fault, *arguments)


@pytest.fixture(scope="module")
def files(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodPlace]:
    """A pod on the namespace's volumes, which hold the demo's model and texts; the workspace is a disk that can be filled."""
    jobs.end("moves")
    until("its pod, which has the workspace as it was, is gone", lambda: not jobs.pods("moves"))
    core, resolved = client.CoreV1Api(jobs.api.client), resolved_job(jobs, "files", SPEC)
    Client().run(lambda cluster: stateful_set_before_start(cluster, resolved))
    layout = default_layout()
    folder = layout.volumes / jobs.namespace / "ml-dev-workspace"
    until("the claim's folder", folder.exists)
    image = tmp_path_factory.mktemp("disk") / "image"
    with (
        small_volume(layout, len(core.list_node().items), folder, image, DISK_BYTES),
        demo_pod(resolved) as pod,
    ):
        yield pod
        jobs.end("drilled")
        until("the job's pods are gone", lambda: not jobs.pods("drilled"))


@pytest.fixture(scope="module")
def drilled(jobs: Jobs, files: PodPlace) -> Jobs:
    """The job that everything is done to, with its first commits made."""
    jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "drilled"}, "spec": SPEC})
    try:
        until("a step", lambda: (jobs.job("drilled").get("status") or {}).get("trainer", {}).get("step"), 400)
        until("two commits", lambda: committed(jobs) >= 20)
    except AssertionError as error:
        said = lockstep("logs", "drilled", "-n", jobs.namespace).stdout.splitlines()[-30:]
        raise AssertionError("\n".join([str(error), str(jobs.job("drilled").get("status")), *said])) from None
    return jobs


@pytest.fixture(scope="module")
def moves(jobs: Jobs) -> Iterator[Jobs]:
    """A job of one node that runs and reports steps."""
    jobs.start("moves", "steps.py", nodes=1, restart={"maxRestarts": 3, "backoffSeconds": 1})
    jobs.until_running("moves")
    yield jobs
    jobs.end("moves")


def test_without_the_rights_nothing_is_done_and_they_are_named(moves: Jobs, cluster: Path, tmp_path: Path) -> None:
    pods = [pod["metadata"]["uid"] for pod in moves.pods("moves")]
    viewer = {"KUBECONFIG": str(kubeconfig_of("view", moves, cluster, tmp_path))}
    done = lockstep("drill", "lose-node", "--job", "moves", "-n", moves.namespace, "--yes", environment=viewer)
    place = f"in namespace {moves.namespace}"
    assert done.returncode == 2
    assert (
        f"nothing was done: create pods/exec {place}; delete pods {place}; get nodes of the cluster; patch nodes of the cluster"
        in done.stderr
    )
    assert [pod["metadata"]["uid"] for pod in moves.pods("moves")] == pods


def test_a_killed_operator_costs_nothing(moves: Jobs) -> None:
    before = until("steps", lambda: status if (status := moves.job("moves")["status"]).get("trainer") else None)
    outcome = drill(moves, "kill-operator", job="moves")
    after = moves.job("moves")["status"]
    assert outcome["attempt"] == before["attempts"] == after["attempts"]
    assert after["trainer"]["step"] > before["trainer"]["step"]


def test_a_lost_node_is_left_and_taken_back_and_costs_no_restart(moves: Jobs) -> None:
    jobs = moves
    attempt = jobs.job("moves")["status"]["attempts"]
    before = jobs.pods("moves")[0]["spec"]["nodeName"]
    assert drill(jobs, "lose-node", job="moves")["attempt"] == attempt
    assert jobs.pods("moves")[0]["spec"]["nodeName"] != before
    assert jobs.job("moves")["status"]["restartsCountTowardsMax"] == 0
    assert not client.CoreV1Api(jobs.api.client).read_node(before).spec.unschedulable


def test_a_volume_with_more_room_than_may_be_filled_is_left_alone(drilled: Jobs) -> None:
    done = lockstep("drill", "fill-disk", "--job", "drilled", "-n", drilled.namespace, "--yes", "--fill-at-most", "1")
    assert (done.returncode, "no more than 1 are to be written" in done.stderr) == (2, True)
    assert drilled.job("drilled")["status"]["attempts"] == 1


def has_recovered(outcome: dict[str, Any], jobs: Jobs) -> bool:
    """Return True if all ranks were seen to stop and to start again, and the next attempt, without a further one between, has trained."""
    measured = [outcome[f"{what}_seconds"] for what in ("stopped", "named", "started", "downtime")]
    return None not in measured and jobs.job("drilled")["status"]["attempts"] == outcome["attempt"] + 1


def test_a_killed_rank_is_named_and_all_stop_and_train_again(drilled: Jobs) -> None:
    outcome = drill_training(drilled, "kill-rank")
    assert "rank 1 on node 1 was ended by SIGKILL" in outcome["named"]
    assert has_recovered(outcome, drilled)


@pytest.mark.long
def test_a_frozen_rank_is_named_and_all_train_again(drilled: Jobs) -> None:
    outcome = drill_training(drilled, "freeze-rank", "--rank", "0")
    assert outcome["named"].startswith("Hang: rank 0 on node 0 ")
    assert has_recovered(outcome, drilled)


@pytest.mark.long
def test_a_damaged_checkpoint_costs_the_way_to_the_one_before(drilled: Jobs) -> None:
    outcome = drill_training(drilled, "corrupt-checkpoint")
    assert outcome["lost_steps"] >= 10
    assert "went back to step-" in outcome["notes"][-1]
    assert has_recovered(outcome, drilled)


def test_a_full_volume_costs_a_commit_and_no_step(drilled: Jobs) -> None:
    outcome = drill_training(drilled, "fill-disk")
    assert "No space left on device" in outcome["named"]
    assert outcome["lost_steps"] == 0


@pytest.mark.long
def test_what_a_drilled_job_has_learned_is_what_an_undisturbed_one_learns(drilled: Jobs, files: PodPlace, tmp_path: Path) -> None:
    """Bit by bit: every step's loss, and the newest commit's weights and moments."""
    drilled.change("drilled", suspend=True)
    drilled.until_condition("drilled", "Suspended", "True", "Suspended")
    status = drilled.job("drilled")["status"]
    assert [entry["cause"] for entry in status["restartHistory"]] == ["Killed", "Hang", "Killed"]
    asked = ["python3", "-c", LEARNED, "/workspace/runs/drilled", str(status["checkpoint"]["lastCommittedStep"] // 10 * 10)]
    learned = json.loads(run_in_pod(files, asked))
    with undisturbed(tmp_path) as folder:
        wanted = until("the undisturbed run gets as far", lambda: _learned(folder, len(learned["losses"]), asked[-1]), 300)
    assert [step for step, _ in learned["losses"]] == list(range(1, len(learned["losses"]) + 1))
    assert learned["losses"] == wanted["losses"][: len(learned["losses"])]
    assert learned["shards"] == wanted["shards"]
    assert len(learned["shards"]) == 2


@contextlib.contextmanager
def undisturbed(folder: Path) -> Iterator[Path]:
    """The run's folder of the same training as two processes of this machine, to which nothing is done."""
    demo = demo_folder()
    (folder / "workspace").mkdir()
    (folder / "workspace" / "models").symlink_to(demo / "models")
    (folder / "datasets").symlink_to(demo / "datasets")
    job = {"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "drilled"}, "spec": SPEC}
    (folder / "job.yaml").write_text(json.dumps(job))
    run = [sys.executable, "-m", "lockstep.cli.main", "run", "-f", "job.yaml", "--cluster", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(run, cwd=folder, stdout=output, stderr=output, env=environment)
    try:
        yield folder / "workspace" / "runs" / "drilled"
    finally:
        process.terminate()
        process.wait(60)


def _learned(folder: Path, steps: int, step: str) -> dict[str, Any] | None:
    done = subprocess.run([sys.executable, "-c", LEARNED, str(folder), step], capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"losses": [], "shards": {}}
    return found if len(found["losses"]) >= steps and found["shards"] else None
