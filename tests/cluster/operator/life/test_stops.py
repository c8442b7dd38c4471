"""Every way to stop a running job saves first: suspend, another size, the deadline, deletion without the operator."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.clusters.cluster_jobs import Jobs, until

OPERATOR = ("-n", "lockstep-system", "deployment/lockstep-operator")
Kubectl = Callable[..., subprocess.CompletedProcess[str]]

# A script that counts steps, reports them, goes on from the last one that it saved, and saves when it is told to stop. Like many, it ends
# with 0 then.
SAVING = """
import json, os, pathlib, signal, socket, sys, time
rank, name = int(os.environ["RANK"]), json.loads(pathlib.Path(os.environ["LOCKSTEP_RUN"]).read_text())["job"]["name"]
saved = pathlib.Path("/workspace") / name
report = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
report.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
def tell(event, **fields):
    report.send(json.dumps({"event": event, "rank": rank, **fields}).encode())
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
step = int(saved.read_text()) if saved.exists() else 0
while not told:
    step += 1
    tell("step", step=step, totalSteps=100000, metrics={"ranks": os.environ["WORLD_SIZE"]})
    time.sleep(0.1)
if rank == 0:
    saved.write_text(str(step))
    tell("checkpoint", step=step, path=str(saved))
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture(scope="module")
def scripts(jobs: Jobs) -> Jobs:
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "saving"}, "data": {"saving.py": SAVING}})
    return jobs


def start(jobs: Jobs, name: str, **spec: Any) -> None:
    volume = {"name": "saving", "mountPath": "/scripts", "configMap": {"name": "saving"}}
    jobs.start(name, "saving.py", podTemplate={"volumes": [volume]}, **spec)
    jobs.until_running(name)


def status(jobs: Jobs, name: str) -> dict[str, Any]:
    return jobs.job(name)["status"]


def events(jobs: Jobs, name: str) -> list[tuple[str, str]]:
    found = jobs.kind("Event").get(namespace=jobs.namespace, field_selector=f"involvedObject.name={name}").to_dict()["items"]
    return [(event["reason"], event["message"]) for event in found]


def test_a_job_that_is_scaled_saves_stops_and_goes_on_at_the_new_size(scripts: Jobs, kubectl: Kubectl) -> None:
    jobs = scripts
    start(jobs, "grows", env=[{"name": "CODE", "value": "75"}])
    scale = ("scale", "-n", jobs.namespace, "trainingjob/grows", "--replicas")
    for turn, nodes in enumerate((1, 2), 1):
        assert kubectl(*scale, str(nodes)).returncode == 0
        until("the stop is told", lambda: status(jobs, "grows").get("stop", {}).get("attempt") == turn, 60)  # noqa: B023
        stop = status(jobs, "grows")["stop"]
        assert (stop["save"], stop["lostSteps"], stop["message"]) == ("Saved", 0, f"saved at step {stop['step']} and stopped")
        jobs.until_condition("grows", "Progressing", "True", "Running")
        until("steps at the new size", lambda: ranks_of_the_metrics(jobs) == str(nodes))  # noqa: B023
        assert len(jobs.pods("grows")) == nodes
        assert status(jobs, "grows")["trainer"]["step"] > stop["step"]
    told = events(jobs, "grows")
    assert ("Resizing", "from 2 to 1 nodes: ranks save and stop; 2 pods are still there") in told
    assert [reason for reason, _ in told].count("SavedAndStopped") == 2
    jobs.end("grows")


def ranks_of_the_metrics(jobs: Jobs) -> str | None:
    metrics = (status(jobs, "grows").get("trainer") or {}).get("metrics") or []
    return next((metric["value"] for metric in metrics if metric["name"] == "ranks"), None)


def test_a_job_that_saves_and_exits_with_0_goes_on_after_a_deleted_pod_is_suspended_and_goes_on(scripts: Jobs) -> None:
    start(scripts, "rests")
    scripts.delete("Pod", "rests-1")
    until("the next attempt", lambda: status(scripts, "rests")["attempts"] == 2)
    scripts.until_running("rests")
    scripts.change("rests", suspend=True)
    told = scripts.until_condition("rests", "Suspended", "True", "Suspended")
    stop = status(scripts, "rests")["stop"]
    assert told["message"].startswith(f"saved at step {stop['step']} and stopped; no pods")
    assert (scripts.workspace() / "rests").read_text() == str(stop["step"])
    scripts.change("rests", suspend=False)
    until("it goes on", lambda: status(scripts, "rests")["attempts"] == 3)
    scripts.until_running("rests")
    scripts.end("rests")


def test_a_job_at_its_deadline_saves_fails_and_is_deleted_when_its_time_is_over(scripts: Jobs) -> None:
    start(scripts, "late", nodes=1, ttlSecondsAfterFinished=2)
    scripts.change("late", activeDeadlineSeconds=1)
    failed = scripts.until_condition("late", "Failed", "True", "DeadlineExceeded")
    assert failed["message"].startswith("pods of the job were on nodes for the 1 s of spec.activeDeadlineSeconds; saved at step")
    until("the job is deleted", lambda: not scripts.job("late"))
    until("nothing of it is left", lambda: scripts.get("StatefulSet", "late", "apps/v1") is None)
    assert scripts.get("PersistentVolumeClaim", "ml-dev-workspace") is not None


@contextmanager
def operator_away(kubectl: Kubectl) -> Iterator[None]:
    before = kubectl("get", *OPERATOR, "-o", "jsonpath={.spec.replicas}").stdout
    pods = ("pods", "-n", "lockstep-system", "-l", "app.kubernetes.io/component=operator")
    assert kubectl("scale", *OPERATOR, "--replicas", "0").returncode == 0
    try:
        assert kubectl("wait", *pods, "--for", "delete", "--timeout", "150s").returncode == 0
        yield
    finally:
        kubectl("scale", *OPERATOR, "--replicas", before)
        kubectl("rollout", "status", *OPERATOR, "--timeout", "150s")


def test_without_an_operator_a_deleted_job_saves_and_another_runs_on_and_its_end_is_heard_afterwards(
    scripts: Jobs, kubectl: Kubectl
) -> None:
    scripts.start("outlives", "until_told.py", nodes=1)
    start(scripts, "deleted")
    scripts.until_running("outlives")
    scripts.until_condition("outlives", "FabricVerified", "Unknown", "Gloo")
    before = [pod["metadata"]["uid"] for pod in scripts.pods("outlives")]
    conditions = status(scripts, "outlives")["conditions"]
    with operator_away(kubectl):
        scripts.end("deleted")
        until("its pods are gone", lambda: not scripts.pods("deleted"))
        assert int((scripts.workspace() / "deleted").read_text()) > 0
        assert [pod["metadata"]["uid"] for pod in scripts.pods("outlives")] == before
        end = kubectl("exec", "-n", scripts.namespace, "outlives-0", "-c", "trainer", "--", "touch", "/tmp/end")  # noqa: S108
        assert end.returncode == 0, end.stderr
        assert status(scripts, "outlives")["conditions"] == conditions
    scripts.until_condition("outlives", "Complete", "True", "Complete")
    assert status(scripts, "outlives")["attempts"] == 1
    scripts.end("outlives")
