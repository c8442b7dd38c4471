"""Why a job doesn't run or has failed, on real pods: what the operator says, what `lockstep why` adds, and what its bundle holds."""

from __future__ import annotations

import json
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes import client

from support.clusters.cluster_jobs import API, SERVICE_ACCOUNT, Jobs, prepare, until
from support.in_process import lockstep

IMAGE = "localhost/lockstep/base:1"
GPU = "nvidia.com/gpu"
ENFORCE = "pod-security.kubernetes.io/enforce"
TOKEN, KEY = "hf_" + "s3cret" * 4, "hunter2x-abcdef"
FAILS = (
    "import os, sys, time\n"
    "print('using', os.environ['MY_TOKEN'], 'and', sys.argv[2], flush=True)\n"
    "if os.environ['RANK'] == '1':\n    raise ValueError('refused: ' + os.environ['MY_TOKEN'])\ntime.sleep(600)\n"
)


def why(jobs: Jobs, name: str) -> tuple[int, dict[str, Any]]:
    done = lockstep("why", name, "-n", jobs.namespace, "-o", "json")
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def dev_pod(node: str) -> dict[str, Any]:
    """Somebody's development environment: it holds a GPU and does nothing."""
    container = {
        "name": "dev", "image": IMAGE, "command": ["python3", "-c", "import signal; signal.signal(15, lambda *_: exit()); signal.pause()"],
        "resources": {"limits": {GPU: "1"}},
    }  # fmt: skip
    spec = {"serviceAccountName": SERVICE_ACCOUNT, "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "dev"},
        "spec": {**spec, "nodeSelector": {"kubernetes.io/hostname": node}},
    }


def test_whoever_holds_the_gpus_that_a_job_lacks_is_named_with_the_command_that_frees_them(
    jobs: Jobs, gpus: list[str], gpu_cluster: str
) -> None:
    jobs.create(dev_pod(gpus[1]))
    until("the environment has its GPU", lambda: (jobs.get("Pod", "dev") or {})["status"].get("phase") == "Running")
    jobs.start("holds", nodes=1, cluster=gpu_cluster, gpusPerNode=1)
    until("a GPU is taken", lambda: any(pod["spec"].get("nodeName") for pod in jobs.pods("holds")))
    jobs.start("lacks", nodes=2, cluster=gpu_cluster, gpusPerNode=1)
    told = jobs.until_condition("lacks", "PodsScheduled", "False", "Unschedulable")["message"]
    command = f"""kubectl patch tj holds -n {jobs.namespace} --type merge -p '{{"spec":{{"suspend":true}}}}'"""
    assert told.startswith(f"0 of 2 pods scheduled: {GPU} is in use on nodes {gpus[0]}, {gpus[1]}: ")
    assert f"TrainingJob {jobs.namespace}/holds holds 1 ({command})" in told
    code, answer = why(jobs, "lacks")
    assert (code, answer["state"]) == (1, "Waiting")
    assert command in answer["summary"]
    assert f"Pod {jobs.namespace}/dev holds 1 (kubectl delete pod dev -n {jobs.namespace})" in answer["summary"]
    jobs.kind("Pod").delete(name="dev", namespace=jobs.namespace, grace_period_seconds=0)
    jobs.change("holds", suspend=True)
    jobs.until_condition("lacks", "PodsScheduled", "True", "AllScheduled", 60)
    jobs.end("lacks")
    jobs.end("holds")
    until("no pods", lambda: not jobs.pods("lacks") and not jobs.pods("holds"), 60)


def test_a_dev_environment_that_nobody_uses_is_named_and_its_command_lets_the_job_start(
    jobs: Jobs, gpus: list[str], gpu_cluster: str, kubectl: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    spec = {"type": "Interactive", "nodes": 2, "cluster": gpu_cluster, "gpusPerNode": 1}
    jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "unused"}, "spec": spec})
    jobs.until_condition("unused", "Progressing", "True", "Ready", 60)
    jobs.start("needs", nodes=2, cluster=gpu_cluster, gpusPerNode=1)
    said = f"TrainingJob {jobs.namespace}/unused, a dev environment in which nothing runs, holds 2 ("
    told = until("it is told who holds them", lambda: said in (m := jobs.condition("needs", "PodsScheduled").get("message", "")) and m)
    command = told.partition(said)[2].partition(")")[0]
    assert kubectl(*shlex.split(command)[1:]).returncode == 0
    jobs.until_condition("needs", "PodsScheduled", "True", "AllScheduled", 60)
    for name in ("needs", "unused"):
        jobs.end(name)
        until("no pods", lambda name=name: not jobs.pods(name), 60)


def test_a_node_that_takes_no_pods_is_named(jobs: Jobs) -> None:
    core = client.CoreV1Api(jobs.api.client)
    node = sorted(found.metadata.name for found in core.list_node().items)[1]
    core.patch_node(node, {"spec": {"unschedulable": True}})
    try:
        jobs.start("cordoned")
        told = jobs.until_condition("cordoned", "PodsScheduled", "False", "Unschedulable")
        assert told["message"].startswith(f"1 of 2 pods scheduled: node {node} is cordoned; holds 1 of 2 nodes; releases them at ")
    finally:
        core.patch_node(node, {"spec": {"unschedulable": None}})
    jobs.until_condition("cordoned", "PodsScheduled", "True", "AllScheduled", 60)
    jobs.end("cordoned")


def test_a_secret_that_is_missing_is_told_once_for_all_pods(jobs: Jobs) -> None:
    jobs.start("secretless", env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k"}}}])
    said = (
        "0 of 2 pods run: pods secretless-0, secretless-1: container trainer: CreateContainerConfigError: "
        'secret "none" not found; create it in the job\'s namespace'
    )
    until("both pods are told", lambda: jobs.condition("secretless", "RanksReady").get("message", "").startswith(said))
    assert jobs.condition("secretless", "Progressing")["reason"] == "ContainerNotStarted"
    jobs.end("secretless")


def test_pods_that_pod_security_refuses_are_told_with_what_helps(other: Jobs) -> None:
    """RDMA pods lock memory as root, which every level but `privileged` forbids."""
    prepare(other.api, other.namespace)
    client.CoreV1Api(other.api.client).patch_namespace(other.namespace, {"metadata": {"labels": {ENFORCE: "baseline"}}})
    kind, name = other.kind("TrainingCluster", API), f"{other.namespace}-rdma"
    spec = kind.get(name="local").to_dict()["spec"]
    spec["network"] = {**spec["network"], "rdma": {"enabled": True}}
    spec["security"] = {**spec["security"], "ipcLock": True}
    kind.create(body={"apiVersion": API, "kind": "TrainingCluster", "metadata": {"name": name}, "spec": spec})
    try:
        other.start("locks", cluster=name, fabric={"mode": "RDMA"})
        told = other.until_condition("locks", "PodsScheduled", "False", "PodsRefused")["message"]
        assert told.startswith(f"0 of 2 pods created: Pod Security level baseline of namespace {other.namespace} forbids the pod: ")
        assert "IPC_LOCK" in told
        assert f"kubectl label namespace {other.namespace} --overwrite pod-security.kubernetes.io/enforce=privileged" in told
    finally:
        other.end("locks")
        kind.delete(name=name)


def test_a_job_in_another_namespace_than_it_was_meant_for_is_found_and_moved(jobs: Jobs, other: Jobs) -> None:
    other.start("astray", cluster="local")
    other.until_condition("astray", "Accepted", "False", "ServiceAccountNotFound")
    code, answer = why(other, "astray")
    assert (code, answer["state"]) == (1, "Refused")
    assert answer["summary"].startswith("cluster local's jobs run in namespace lockstep: was -n lockstep forgotten? service account")
    assert answer["next"][0]["command"] == f"lockstep delete astray -n {other.namespace}"
    for verb in ("get", "why", "logs"):
        missed = lockstep(verb, "astray", "-n", jobs.namespace)
        assert missed.returncode == 2, missed.stdout
        assert f"but namespace {other.namespace} has one: add -n {other.namespace}" in missed.stderr
    other.end("astray")


def test_a_model_that_nobody_has_named_is_corrected_in_a_new_job(jobs: Jobs) -> None:
    training = {"model": {"name": "/workspace/models/MODEL"}, "data": {"path": "/datasets/train.jsonl"}}
    jobs.create(
        {
            "apiVersion": API,
            "kind": "TrainingJob",
            "metadata": {"name": "unnamed"},
            "spec": {"cluster": "local", "nodes": 1, "training": training},
        }
    )
    assert lockstep("wait", "unnamed", "-n", jobs.namespace, "--timeout", "110").returncode == 1
    code, answer = why(jobs, "unnamed")
    assert (code, answer["state"]) == (1, "Failed") and "/workspace/models/MODEL" in answer["summary"]
    place = f"-n {jobs.namespace}"
    assert [step["command"] for step in answer["next"]][:3] == [
        f"lockstep delete unnamed {place}", f"lockstep run -f FILE {place}", f"lockstep retry unnamed {place}",
    ]  # fmt: skip
    jobs.end("unnamed")


def test_a_held_failure_is_explained_bundled_without_its_secret_and_let_go(jobs: Jobs, tmp_path: Path) -> None:
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "fails"}, "data": {"fails.py": FAILS}})
    spec = {
        "nodes": 2,
        "script": {"path": "/fails/fails.py", "args": ["--api-key", KEY]},
        "podTemplate": {"volumes": [{"name": "fails", "mountPath": "/fails", "configMap": {"name": "fails"}}]},
        "env": [{"name": "MY_TOKEN", "value": TOKEN}],
        "restart": {"maxRestarts": 0, "holdOnFailureSeconds": 600},
    }
    jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "dies"}, "spec": spec})
    jobs.until_condition("dies", "Failed", "True", "RanksFailed", 60)
    held = jobs.until_condition("dies", "Held", "True", "HoldOnFailure")
    archive = tmp_path / "dies.tar.gz"
    done = lockstep("why", "dies", "-n", jobs.namespace, "--bundle", str(archive))
    assert done.returncode == 1, done.stderr
    assert "first cause  rank 1 on node 1 (Node lockstep" in done.stdout
    assert "kubectl exec -it dies-1" in done.stdout
    with tarfile.open(archive) as bundle:
        files = {name.partition("/")[2]: bundle.extractfile(name).read().decode() for name in bundle.getnames()}  # type: ignore[union-attr]
    assert {
        "why.txt",
        "events.yaml",
        "objects/TrainingJob-dies.yaml",
        "objects/Pod-dies-1.yaml",
        "objects/StatefulSet-dies.yaml",
    } <= files.keys()
    assert {"pods/dies-0/trainer.log", "pods/dies-1/trainer.log", "pods/dies-0/agent.log", "run/gang/end.json"} <= files.keys()
    assert "nothing that was looked for" in files["README.txt"]
    assert "using (redacted) and (redacted)" in files["pods/dies-1/trainer.log"]
    assert "ValueError" in files["pods/dies-1/trainer.log"]
    assert not [name for name, text in files.items() if TOKEN in text or KEY in text]
    assert not [name for name in files if "Secret" in name]
    assert len(jobs.pods("dies")) == 2
    assert jobs.condition("dies", "Held")["message"] == held["message"]
    jobs.change("dies", restart={"maxRestarts": 0, "holdOnFailureSeconds": 0})
    until("the pods are gone", lambda: not jobs.pods("dies"), 60)
    assert jobs.condition("dies", "Held")["reason"] == "NotHeld"
    jobs.end("dies")
