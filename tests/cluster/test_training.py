"""Lockstep's trainer on real pods: the same losses as one process, compiled code, and images without Lockstep."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, dynamic

from cluster.operator.verbs.test_verbs import lockstep
from lockstep.api.job import TrainingJob
from lockstep.cli.clusters.demo import demo_folder
from lockstep.cli.clusters.deploy import install_cluster
from lockstep.cli.clusters.deploymentplan import Mode
from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.cli.shared.places import Verb
from lockstep.kube.exec import PodPlace
from lockstep.plan.render.readerpod import LABEL_READER_OF
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.plan.render.run import training_json
from lockstep.platforms.files import reader
from support.clusters.cluster_demo import demo_files, run_in_pod
from support.clusters.cluster_jobs import API, Jobs, prepare, until
from support.rounding import forward_roundings, gradient_roundings, tolerance

# Of the demo's model and batches: sums in another order.
FORWARD = forward_roundings(hidden=96, intermediate=256, attention=96, vocabulary=1024, sequence=64, layers=4)
TOLERANCE = tolerance(gradient_roundings(FORWARD, tokens=8 * 64))
TRAINING: dict[str, Any] = {
    "model": {"name": "/workspace/models/tiny-base"},
    "lora": {"rank": 4, "alpha": 8},
    "precision": "FP32",
    "data": {"path": "/datasets/demo.jsonl", "maxLength": 64},
    "optimization": {"maxSteps": 5, "learningRate": "5e-3", "microBatchSize": 2, "globalBatchSize": 8, "warmupSteps": "2"},
    "evaluation": {"everySteps": 5, "holdout": "0.1", "samples": 12},
    "checkpoint": {"everySteps": 5, "resumeFrom": "None"},
}

# Every module of the environment that training imports, and whether its bytecode is there and is that of its source.
STALE_BYTECODE = """
import importlib.util, struct, sys
import torch, deepspeed, transformers, peft, safetensors, lockstep_train.assemble, lockstep_train.loop
def is_stale(module):
    source = getattr(module, "__file__", None) or ""
    if not source.endswith(".py") or not source.startswith("/opt/lockstep/"):
        return False
    try:
        with open(importlib.util.cache_from_source(source), "rb") as file:
            magic, flags, stamp, size = struct.unpack("<4sIII", file.read(16))
    except OSError:
        return True
    import os
    seen = os.stat(source)
    return magic != importlib.util.MAGIC_NUMBER or (stamp, size) != (int(seen.st_mtime), seen.st_size)
loaded = [m for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").startswith("/opt/lockstep/")]
print(len(loaded), [m.__name__ for m in loaded if is_stale(m)])
"""


@pytest.fixture(scope="module")
def jobs(api: dynamic.DynamicClient) -> Iterator[Jobs]:
    """A namespace of this module's own on a cluster with the operator."""
    install_cluster(Verb(), "local", Mode.TCP)
    core = client.CoreV1Api(api.client)
    namespace = core.create_namespace({"metadata": {"generateName": "lockstep-test-"}}).metadata.name
    try:
        yield prepare(api, namespace)
    finally:
        core.delete_namespace(namespace)


@pytest.fixture(scope="module")
def files(jobs: Jobs) -> Iterator[PodPlace]:
    """A pod on the namespace's volumes, which hold the demo's model and texts."""
    with demo_files(jobs, {"nodes": 2, "training": TRAINING}) as pod:
        yield pod


@pytest.fixture(scope="module")
def losses_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What the same training logs here, as one process with the same global batch."""
    folder, demo = tmp_path_factory.mktemp("alone"), demo_folder()
    training = TRAINING | {
        "model": {"name": str(demo / "models" / "tiny-base")},
        "data": TRAINING["data"] | {"path": str(demo / "datasets" / "demo.jsonl")},
    }
    job = TrainingJob.model_validate({"metadata": {"name": "alone"}, "spec": {"nodes": 1, "training": training}})
    resolved = resolve(job, load_cluster("local").profile, PlatformDefaults())
    run = {
        "job": {"name": "alone", "namespace": "", "uid": "alone"},
        "runDir": str(folder),
        "training": None if resolved.training is None else training_json(resolved.training),
    }
    (folder / "run.json").write_text(json.dumps(run))
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HOME": str(folder), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "lockstep_train", "--run", str(folder / "run.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return losses_in((folder / "logs" / "train_log.jsonl").read_text())


def losses_in(log: str) -> list[float]:
    return [json.loads(line)["loss"] for line in log.splitlines()]


def train(jobs: Jobs, stage: str) -> str:
    """The name of a job that has trained with this stage: made and waited for once, and left there for the other tests."""
    name = stage.lower()
    if not jobs.job(name):
        spec = {"nodes": 2, "training": TRAINING | {"zeroStage": stage}}
        jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec})
    jobs.until_condition(name, "Complete", "True", "Complete", 240)
    return name


@pytest.mark.parametrize("stage", ["Stage2", pytest.param("Stage3", marks=pytest.mark.long)])
def test_two_pods_give_the_losses_of_one_process_with_the_same_global_batch(
    jobs: Jobs, files: PodPlace, losses_of_one_process: list[float], stage: str
) -> None:
    name = train(jobs, stage)
    log = run_in_pod(files, ["cat", f"/workspace/runs/{name}/logs/train_log.jsonl"])
    assert len(losses_of_one_process) == TRAINING["optimization"]["maxSteps"]
    assert losses_in(log) == pytest.approx(losses_of_one_process, rel=TOLERANCE)
    status = jobs.job(name)["status"]
    assert status["checkpoint"]["lastCommittedStep"] == TRAINING["optimization"]["maxSteps"]
    assert status["trainer"]["progressPercentage"] == 100


@pytest.fixture
def trained(jobs: Jobs, files: PodPlace) -> str:
    """A job that has ended, with its adapter on the volume; its pods are gone."""
    name = train(jobs, "Stage2")
    until("its pods are gone", lambda: not jobs.pods(name), 60)
    return name


def readers(jobs: Jobs, job: str) -> list[str]:
    """Pods that verbs made for themselves to read a job's files, and that nobody has removed yet."""
    pods = jobs.kind("Pod").get(namespace=jobs.namespace, label_selector=f"{LABEL_READER_OF}={job}").to_dict()["items"]
    return [pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def test_every_verb_that_looks_tells_the_same_of_a_job_that_has_trained(jobs: Jobs, trained: str) -> None:
    steps = TRAINING["optimization"]["maxSteps"]
    assert lockstep(jobs, "get", trained, "-o", "name").stdout.split() == [f"trainingjob.lockstep.dev/{trained}"]
    assert lockstep(jobs, "wait", trained, "--timeout", "5").returncode == 0
    described = lockstep(jobs, "describe", trained).stdout
    assert f"Adapter     /workspace/runs/{trained}/adapter\n" in described and f"{steps}/{steps}" in described
    assert "Complete" in lockstep(jobs, "describe", trained).stdout
    assert lockstep(jobs, "why", trained).stdout.startswith(f"{trained}: Complete: ")
    assert "Eval Loss" in lockstep(jobs, "logs", trained).stdout
    shown = lockstep(jobs, "top", trained, "-o", "json")
    assert [step for step, _ in json.loads(shown.stdout)["loss"]] == list(range(1, steps + 1)), shown.stderr


@pytest.mark.long
def test_scaling_is_measured_in_pods_and_nothing_of_it_stays(jobs: Jobs, files: PodPlace, tmp_path: Path) -> None:
    job = {
        "apiVersion": "lockstep.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "scaled"},
        "spec": {"cluster": "local", "nodes": 2, "training": TRAINING},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    told = lockstep(jobs, "bench", "scaling", str(tmp_path / "job.json"), "--steps", "3", "-o", "json")
    assert told.returncode == 0, told.stderr
    one, two = json.loads(told.stdout)["runs"]
    assert (one["nodes"], one["steps"], two["nodes"], two["steps"]) == (1, 3, 2, 3)
    assert one["efficiency"] == 1.0 and two["tokensPerSecond"] > 0 and 0 <= two["waiting"] <= 1
    assert "measured" not in run_in_pod(files, ["ls", "-a", "/workspace/runs"])
    assert jobs.get("StatefulSet", "scaled-scaling", "apps/v1") is None


def test_a_shell_in_a_pod_that_is_gone_leads_to_what_the_job_has_left(jobs: Jobs, trained: str) -> None:
    told = lockstep(jobs, "shell", trained)
    assert told.returncode == 1 and f"pod {trained}-0 is gone: lockstep logs {trained} -n {jobs.namespace}" in told.stderr, told


def test_an_adapter_is_fetched_as_it_lies_on_the_volume(jobs: Jobs, trained: str, files: PodPlace, tmp_path: Path) -> None:
    told = lockstep(jobs, "adapter", "get", trained, str(tmp_path / "adapter"))
    assert told.returncode == 0, told.stderr
    base = TRAINING["model"]["name"]
    assert (
        told.stdout == f"{tmp_path}/adapter: /workspace/runs/{trained}/adapter of job {trained}. "
        f"PEFT finds no {base} here: load the base model from its folder on this machine, and pass it\n"
    )
    there = run_in_pod(files, ["sh", "-c", f"cd /workspace/runs/{trained}/adapter; sha256sum *"])
    assert {line.split()[1]: line.split()[0] for line in there.splitlines()} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "adapter").iterdir()
    }
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == TRAINING["lora"]["rank"]


def test_a_whole_model_is_made_in_a_pod_that_is_gone_afterwards(jobs: Jobs, trained: str, files: PodPlace, tmp_path: Path) -> None:
    told = lockstep(jobs, "adapter", "merge", trained, "--output", str(tmp_path / "model"))
    assert told.returncode == 0, told.stderr
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert ".merged-" not in run_in_pod(files, ["ls", "-A", f"/workspace/runs/{trained}"])
    assert readers(jobs, trained) == []


def test_text_is_written_with_and_without_the_adapter_and_its_pod_is_gone_afterwards(jobs: Jobs, trained: str) -> None:
    told = lockstep(jobs, "generate", trained, "The value of", "--max-tokens", "8", "--base", "--plain")
    assert told.returncode == 0, told.stderr
    nothing, base, adapted = told.stdout.split("--- ")
    assert nothing == "" and base.startswith(f"{TRAINING['model']['name']}\nThe value of")
    assert adapted.startswith(f"/workspace/runs/{trained}/adapter\nThe value of")
    assert readers(jobs, trained) == []


def test_a_chat_goes_on_in_a_pod_that_is_gone_afterwards(jobs: Jobs, trained: str) -> None:
    told = lockstep(jobs, "chat", trained, "--base", "--step", "5", "--max-tokens", "4", stdin="The value\nof\n")
    assert told.returncode == 0, told.stderr
    assert f"/workspace/runs/{trained}/checkpoints/step-5.a" in told.stderr
    assert (told.stdout.count("base: "), told.stdout.count("tuned: ")) == (2, 2)
    assert readers(jobs, trained) == []


def test_gpus_that_no_node_has_are_told_instead_of_text(jobs: Jobs, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TROUBLE_SECONDS", 2.0)
    told = lockstep(jobs, "generate", trained, "The value of", "--gpus", "1")
    assert told.returncode == 1 and "nvidia.com/gpu" in told.stderr, told


@pytest.mark.long
def test_everything_that_training_imports_in_a_pod_is_compiled(jobs: Jobs, files: PodPlace) -> None:
    count, _, stale = run_in_pod(files, ["python3", "-c", STALE_BYTECODE]).strip().splitlines()[-1].partition(" ")
    assert int(count) > 1000
    assert json.loads(stale.replace("'", '"')) == []


def test_a_job_runs_where_python_is_there_but_lockstep_is_not(jobs: Jobs) -> None:
    """PYTHONPATH of the cluster is emptied: the image's own Python has nothing but its standard library."""
    script = (
        "import importlib.util, sys\nsys.exit(sum(importlib.util.find_spec(n) is not None for n in ('lockstep', 'lockstep_gang',"
        " 'torch')))\n"
    )
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "bare"}, "data": {"bare.py": script}})
    volume = {"name": "bare", "mountPath": "/bare", "configMap": {"name": "bare"}}
    spec = {
        "nodes": 2,
        "script": {"command": ["sh", "-c"], "args": ['exec python3 /bare/bare.py "$RANK"']},
        "env": [{"name": "PYTHONPATH", "value": ""}],
        "podTemplate": {"volumes": [volume]},
        "restart": {"maxRestarts": 0},
    }
    jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "bare"}, "spec": spec})
    jobs.until_condition("bare", "Complete", "True", "Complete", 60)
