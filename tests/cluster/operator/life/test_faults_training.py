"""The operator is killed, paused and cut off while real ranks train, fail and start again: training goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.devcluster.host import processes
from lockstep.devcluster.host.layout import default_layout
from support.clusters.cluster_jobs import Jobs, until

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
SYSTEM = "lockstep-system"
UNDISTURBED_STEPS = 10
# A file grows by a byte with every step. Files on a volume are seen and made without the API server, too.
TRAINS = """
import os, pathlib, time
attempt, rank, folder = os.environ["LOCKSTEP_ATTEMPT"], os.environ["RANK"], pathlib.Path("/workspace/{name}")
folder.mkdir(exist_ok=True)
while not (end := folder / f"end-{{attempt}}").exists():
    with (folder / f"steps-{{attempt}}-{{rank}}").open("a") as steps:
        steps.write(".")
    time.sleep(0.1)
if end.read_text() == "fails" and rank == "1":
    raise ValueError(f"attempt {{attempt}} fails")
while end.read_text() == "fails":
    time.sleep(0.1)
"""


class Training:
    """A job whose attempts end when and as the test says, and whose steps it sees whatever becomes of the control plane."""

    def __init__(self, jobs: Jobs, name: str, **spec: Any) -> None:
        self.jobs, self.name = jobs, name
        script = {"trains.py": TRAINS.format(name=name)}
        jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-script"}, "data": script})
        volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": f"{name}-script"}}
        restart = {"maxRestarts": 3, "backoffSeconds": 0}
        jobs.start(name, "trains.py", podTemplate={"volumes": [volume]}, restart=restart, **spec)
        jobs.until_running(name)
        self.folder, self.pods = jobs.workspace() / name, uids(jobs, name)

    def steps(self, attempt: int) -> int:
        """Number of steps that both ranks have made."""
        files = [self.folder / f"steps-{attempt}-{rank}" for rank in (0, 1)]
        return min(file.stat().st_size if file.exists() else 0 for file in files)

    def until_steps_go_on(self, attempt: int, count: int = UNDISTURBED_STEPS) -> None:
        before = self.steps(attempt)
        until(f"steps of attempt {attempt}", lambda: self.steps(attempt) >= before + count)

    def end_attempt(self, attempt: int, how: str) -> None:
        """`how`: "fails" or "completes". Ranks see all of the file or none."""
        temporary = self.folder / "end"
        temporary.write_text(how)
        temporary.rename(self.folder / f"end-{attempt}")

    def until_complete(self, attempts: int) -> None:
        """Complete it, and check that it made each attempt once, in the pods that it began with."""
        until("its status has the attempt", lambda: self.jobs.job(self.name)["status"].get("attempts") == attempts)
        self.until_steps_go_on(attempts)
        assert set(uids(self.jobs, self.name).items()) == set(self.pods.items())
        self.end_attempt(attempts, "completes")
        self.jobs.until_condition(self.name, "Complete", "True", "Complete")
        status = self.jobs.job(self.name)["status"]
        assert (status["attempts"], status["restarts"]) == (attempts, attempts - 1)
        assert {file.name.split("-")[1] for file in self.folder.glob("steps-*")} == {str(n) for n in range(1, attempts + 1)}
        self.jobs.end(self.name)


def uids(jobs: Jobs, name: str) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in jobs.pods(name)}


def leader(jobs: Jobs) -> str:
    """The pod that holds the Lease."""
    lease = Jobs(jobs.api, SYSTEM).get("Lease", "lockstep-operator", "coordination.k8s.io/v1")
    return str(lease["spec"].get("holderIdentity") or "")


def process_of(pod: str) -> int:
    """The operator's process in this pod: nodes of the embedded cluster are namespaces of this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"lockstep.platforms.operator.replica" in command and f"LOCKSTEP_POD={pod}\0".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"pod {pod} has no process of the operator")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_training_and_restarts_go_on_while_the_leader_is_paused_and_it_gives_way_when_it_wakes(jobs: Jobs) -> None:
    training = Training(jobs, "paused")
    old = leader(jobs)
    pid = process_of(old)
    with stopped(pid):
        training.end_attempt(1, "fails")
        until("another replica leads", lambda: leader(jobs) not in ("", old))
        until("status has the second attempt", lambda: jobs.job("paused")["status"].get("attempts") == 2)
        training.until_steps_go_on(2)
    until("the old leader's process ends", lambda: processes.start_ticks(pid) is None)
    assert leader(jobs) not in ("", old)
    training.until_steps_go_on(2)
    training.end_attempt(2, "fails")
    training.until_complete(3)


def test_training_and_a_restart_go_on_while_the_api_server_is_away_and_the_leader_is_killed(jobs: Jobs) -> None:
    """Kubernetes gives up nodes that it hears nothing of for 40 s, so all of this is short."""
    training = Training(jobs, "cut-off", preflight="None")
    daemon = processes.running(default_layout().daemons, "kube-apiserver")
    with stopped(daemon.pid):
        training.until_steps_go_on(1, 2)
        training.end_attempt(1, "fails")
        training.until_steps_go_on(2, 2)
    os.kill(process_of(leader(jobs)), signal.SIGKILL)
    training.until_complete(2)


def test_a_leader_that_is_told_to_end_hands_over_at_once(jobs: Jobs, kubectl: Kubectl) -> None:
    """It releases the Lease: the other replica needn't wait until it is over."""
    ready = kubectl("rollout", "status", "deployment/lockstep-operator", "-n", SYSTEM, "--timeout=150s")
    assert ready.returncode == 0, ready.stderr
    old, kind = leader(jobs), jobs.kind("Lease", "coordination.k8s.io/v1")
    version = kind.get(name="lockstep-operator", namespace=SYSTEM).metadata.resourceVersion
    assert kubectl("delete", "pod", old, "-n", SYSTEM, "--wait=false").returncode == 0
    holders: list[str] = []
    for event in kind.watch(namespace=SYSTEM, name="lockstep-operator", resource_version=version, timeout=180):
        holders.append(event["raw_object"]["spec"].get("holderIdentity") or "")
        if holders[-1] not in ("", old):
            break
    assert list(dict.fromkeys([old, *holders]))[:2] == [old, ""], holders
    assert holders[-1] not in ("", old)
