"""The operator is killed, paused and cut off while real ranks train, fail and start again: training goes on as if nothing had happened."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.devcluster.host import processes
from lockstep.devcluster.host.layout import default_layout
from support.clusters.cluster_jobs import Jobs, until

pytestmark = pytest.mark.alone
Kubectl = Callable[..., subprocess.CompletedProcess[str]]
SYSTEM = "lockstep-system"
GAP_SECONDS = 3.0
TRAINS = """
import os, sys, time
attempt, rank, lasts = int(os.environ["LOCKSTEP_ATTEMPT"]), int(os.environ["RANK"]), {lasts}
end = time.time() + lasts[attempt - 1]
while time.time() < end:
    print("attempt", attempt, "at", time.time(), flush=True)
    time.sleep(0.2)
if attempt < len(lasts):
    if rank == 1:
        raise ValueError(f"attempt {{attempt}} fails")
    time.sleep(600)
"""


def start(jobs: Jobs, name: str, lasts: tuple[int, ...]) -> dict[str, str]:
    """A job whose attempts last so many seconds and fail, but for the last; its pods' uids once it trains."""
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-script"},
        "data": {"trains.py": TRAINS.format(lasts=lasts)},
    }
    jobs.create(body)
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": f"{name}-script"}}
    restart = {"maxRestarts": len(lasts), "backoffSeconds": 1}
    jobs.start(name, "trains.py", podTemplate={"volumes": [volume]}, restart=restart)
    jobs.until_running(name)
    return uids(jobs, name)


def uids(jobs: Jobs, name: str) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in jobs.pods(name)}


def leader(jobs: Jobs) -> str:
    """The pod that holds the Lease."""
    lease = Jobs(jobs.api, SYSTEM).get("Lease", "lockstep-operator", "coordination.k8s.io/v1")
    assert lease is not None
    return str(lease["spec"].get("holderIdentity") or "")


def until_another_leads(jobs: Jobs, old: str, seconds: float) -> float:
    """How long it took."""
    began = time.monotonic()
    until("another replica leads", lambda: leader(jobs) not in ("", old), seconds)
    return time.monotonic() - began


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


def steps(kubectl: Kubectl, jobs: Jobs, name: str) -> dict[int, list[float]]:
    """When rank 0 did its steps, by attempt."""
    log = kubectl("logs", f"{name}-0", "-n", jobs.namespace, "-c", "trainer").stdout
    found: dict[int, list[float]] = {}
    for attempt, at in re.findall(r"\[rank 0\] attempt (\d+) at ([\d.]+)", log):
        found.setdefault(int(attempt), []).append(float(at))
    return found


def longest_gap(times: list[float]) -> float:
    return max(b - a for a, b in itertools.pairwise(times))


def until_complete(kubectl: Kubectl, jobs: Jobs, name: str, attempts: int) -> dict[int, list[float]]:
    """All steps. Their log goes with the pod, so it is read before the end."""
    until(f"attempt {attempts}", lambda: len(steps(kubectl, jobs, name)) == attempts, 90)
    until("its steps", lambda: len(steps(kubectl, jobs, name)[attempts]) > 10)
    found = steps(kubectl, jobs, name)
    jobs.until_condition(name, "Complete", "True", "Complete", 60)
    status = jobs.job(name)["status"]
    assert (status["attempts"], status["restarts"]) == (attempts, attempts - 1)
    assert sorted(found) == list(range(1, attempts + 1))
    return found


@pytest.mark.long
def test_training_and_restarts_go_on_while_the_leader_is_paused_and_it_gives_way_when_it_wakes(jobs: Jobs, kubectl: Kubectl) -> None:
    pods = start(jobs, "paused", (12, 45, 8))
    old = leader(jobs)
    pid = process_of(old)
    began = time.monotonic()
    with stopped(pid):
        took = until_another_leads(jobs, old, 40)
        until("status has the second attempt", lambda: jobs.job("paused")["status"].get("attempts") == 2)
        time.sleep(max(0.0, 40 - (time.monotonic() - began)))
    until("the old leader's process ends", lambda: not alive(pid))
    assert leader(jobs) not in ("", old)
    print(f"failover in {took:.1f} s")
    assert took < 20
    found = until_complete(kubectl, jobs, "paused", 3)
    assert longest_gap(found[1]) < GAP_SECONDS
    assert longest_gap(found[2]) < GAP_SECONDS
    assert set(uids(jobs, "paused").items()) <= set(pods.items())
    jobs.end("paused")


def alive(pid: int) -> bool:
    return processes.start_ticks(pid) is not None


def test_training_and_a_restart_go_on_while_the_api_server_is_away_and_the_leader_is_killed(jobs: Jobs, kubectl: Kubectl) -> None:
    pods = start(jobs, "cut-off", (6, 20))
    daemon = processes.running(default_layout().daemons, "kube-apiserver")
    assert daemon is not None
    with stopped(daemon.pid):
        time.sleep(10)  # the fault's length, in which attempt 1 fails and attempt 2 begins
    os.kill(process_of(leader(jobs)), signal.SIGKILL)
    found = until_complete(kubectl, jobs, "cut-off", 2)
    assert longest_gap(found[2]) < GAP_SECONDS
    assert found[2][0] - found[1][-1] < 15
    assert set(uids(jobs, "cut-off").items()) <= set(pods.items())
    jobs.end("cut-off")


def test_a_leader_that_is_told_to_end_hands_over_at_once(jobs: Jobs, kubectl: Kubectl) -> None:
    ready = kubectl("rollout", "status", "deployment/lockstep-operator", "-n", SYSTEM, "--timeout=50s")
    assert ready.returncode == 0, ready.stderr
    old = leader(jobs)
    assert kubectl("delete", "pod", old, "-n", SYSTEM, "--wait=false").returncode == 0
    assert until_another_leads(jobs, old, 15) < 8
