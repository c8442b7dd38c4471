"""A dev environment on real pods: runs from both pods and from a laptop, what stops them, and GPUs that nobody uses."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.clusters.cluster_jobs import Jobs, until

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
ENV = "dev"
SCRIPTS = {
    "who.py": "import os\nprint('I am', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n",
    "seven.py": "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(7)\ntime.sleep(600)\n",
    "stay.py": "import os, time\nprint('here', os.environ['RANK'], flush=True)\ntime.sleep(600)\n",
}


@pytest.fixture(scope="module")
def environment(jobs: Jobs) -> Iterator[str]:
    """Two nodes that wait for what they are asked to run."""
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "dev-scripts"}, "data": SCRIPTS})
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "dev-scripts"}}
    spec = {"nodes": 2, "type": "Interactive", "podTemplate": {"volumes": [volume]}}
    jobs.create({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": ENV}, "spec": spec})
    jobs.until_condition(ENV, "Progressing", "True", "Ready")
    yield ENV
    jobs.end(ENV)


def in_pod(kubectl: Kubectl, jobs: Jobs, node: int, *command: str) -> subprocess.CompletedProcess[str]:
    return kubectl("exec", "-n", jobs.namespace, f"{ENV}-{node}", "-c", "trainer", "--", *command)


def typed(kubectl: Kubectl, jobs: Jobs, node: int, *words: str) -> subprocess.CompletedProcess[str]:
    """What somebody types in the pod of this node."""
    return in_pod(kubectl, jobs, node, "python3", "/lockstep/agent.pyz", *words)


def laptop(jobs: Jobs, *words: str) -> subprocess.Popen[str]:
    """The command line in a process of its own, that can be interrupted and killed."""
    command = [sys.executable, "-m", "lockstep.cli.main", "run", "--job", ENV, "-n", jobs.namespace, *words]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def until_here(process: subprocess.Popen[str]) -> None:
    """Both ranks run."""
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if {"[rank 0] here 0\n", "[rank 1] here 1\n"} <= set(seen):
            return
    raise AssertionError(f"it ended before both ranks ran: {seen}")


def ready(jobs: Jobs) -> None:
    jobs.until_condition(ENV, "Progressing", "True", "Ready")


def test_a_script_runs_on_both_nodes_from_either_pod_and_from_a_laptop(jobs: Jobs, environment: str, kubectl: Kubectl) -> None:
    both = {"[rank 0] I am 0 of 2", "[rank 1] I am 1 of 2"}
    for node in (0, 1):
        ended = typed(kubectl, jobs, node, "run", "/scripts/who.py")
        assert ended.returncode == 0, ended.stderr
        assert both <= set(ended.stdout.splitlines())
    process = laptop(jobs, "/scripts/who.py")
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert both <= set(output.splitlines())
    log = kubectl("logs", "-n", jobs.namespace, f"{ENV}-0", "-c", "trainer").stdout
    assert log.count("[rank 1] I am 1 of 2") == 3


def test_a_script_beside_the_person_that_is_another_than_the_pods_is_warned_of(
    jobs: Jobs, environment: str, kubectl: Kubectl, tmp_path: Path
) -> None:
    assert in_pod(kubectl, jobs, 0, "cp", "/scripts/who.py", "/workspace/own.py").returncode == 0
    command = [sys.executable, "-m", "lockstep.cli.main", "run", "--job", ENV, "-n", jobs.namespace, "own.py"]
    for text, warned in ((SCRIPTS["who.py"], False), ("print('mine')\n", True)):
        (tmp_path / "own.py").write_text(text)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0 and "I am 1 of 2" in done.stdout, done.stderr
        sync = f"own.py here differs from /workspace/own.py of the pods, which runs: lockstep sync {ENV} . -n {jobs.namespace}"
        assert (f"warning: {sync}" in done.stderr) is warned, done.stderr


def test_shells_pods_and_files_are_as_the_page_says(jobs: Jobs, environment: str, kubectl: Kubectl) -> None:
    shown = in_pod(kubectl, jobs, 1, "sh", "-c", "echo $NODE_RANK $WORLD_SIZE $NNODES $MASTER_ADDR; cat /workspace/hostfile").stdout.split(
        "\n"
    )
    assert shown[0] == f"1 2 2 {ENV}-0.{ENV}-headless"
    assert shown[1:3] == [f"{ENV}-{node}.{ENV}-headless slots=1" for node in (0, 1)]
    assert "export RANK=1" in typed(kubectl, jobs, 1, "env").stdout
    assert len(kubectl("get", "pods", "-n", jobs.namespace, "-l", f"app={ENV}-multi", "-o", "name").stdout.split()) == 2


def test_the_exit_code_is_the_failing_rank_s_and_the_job_is_none_the_worse(jobs: Jobs, environment: str, kubectl: Kubectl) -> None:
    process = laptop(jobs, "/scripts/seven.py")
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 7, output
    assert "rank 1 on node 1 exited with 7" in output
    missing = typed(kubectl, jobs, 0, "run", "/scripts/absent.py")
    assert missing.returncode == 78
    assert "node 0 has no /scripts/absent.py" in missing.stderr
    ready(jobs)
    status = jobs.job(ENV)["status"]
    assert status.get("restarts", 0) == 0
    assert jobs.condition(ENV, "Failed")["status"] == "False"


def test_one_run_at_a_time_and_ctrl_c_on_the_laptop_stops_it_everywhere(jobs: Jobs, environment: str, kubectl: Kubectl) -> None:
    process = laptop(jobs, "/scripts/stay.py")
    until_here(process)
    running = jobs.until_condition(ENV, "Progressing", "True", "Running")
    assert "/scripts/stay.py runs since" in running["message"]
    refused = typed(kubectl, jobs, 1, "run", "/scripts/who.py")
    assert refused.returncode == 1
    assert "refused: /scripts/stay.py runs since" in refused.stderr
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    ready(jobs)


def test_a_laptop_that_is_gone_leaves_nothing_running(jobs: Jobs, environment: str) -> None:
    process = laptop(jobs, "/scripts/stay.py")
    until_here(process)
    process.kill()
    process.communicate(timeout=180)
    ready(jobs)


def test_kubectl_scale_gives_the_environment_another_number_of_nodes(jobs: Jobs, environment: str, kubectl: Kubectl) -> None:
    def scaled(nodes: int) -> None:
        done = kubectl("scale", f"tj/{ENV}", f"--replicas={nodes}", "-n", jobs.namespace)
        assert done.returncode == 0, done.stderr
        until(f"it has {nodes} pods", lambda: (jobs.job(ENV)["status"].get("nodes"), len(jobs.pods(ENV))) == (nodes, nodes))
        jobs.until_condition(ENV, "Progressing", "True", "Ready")

    scaled(1)
    assert in_pod(kubectl, jobs, 0, "cat", "/workspace/hostfile").stdout == f"{ENV}-0.{ENV}-headless slots=1\n"
    ended = typed(kubectl, jobs, 0, "run", "/scripts/who.py")
    assert (ended.returncode, [line for line in ended.stdout.splitlines() if "I am" in line]) == (0, ["[rank 0] I am 0 of 1"]), ended.stderr
    scaled(2)


def test_gpus_that_nobody_uses_are_released_and_come_back(jobs: Jobs, environment: str) -> None:
    jobs.change(ENV, suspend=True, idleSeconds=16)
    jobs.until_condition(ENV, "Suspended", "True", "Suspended")
    jobs.change(ENV, suspend=False)
    released = jobs.until_condition(ENV, "Suspended", "True", "Idle")
    assert released["message"].endswith(f"lockstep resume {ENV} -n {jobs.namespace}")
    assert jobs.pods(ENV) == []
    told = until("both events", lambda: {"IdleWarning", "IdleReleased"} <= {event["reason"] for event in events(jobs)})
    assert told
    jobs.change(ENV, idleSeconds=3600)
    back = subprocess.run(
        [sys.executable, "-m", "lockstep.cli.main", "resume", ENV, "-n", jobs.namespace], check=False, capture_output=True
    )
    assert back.returncode == 0, back.stderr
    ready(jobs)


def events(jobs: Jobs) -> list[dict[str, str]]:
    return list(jobs.kind("Event").get(namespace=jobs.namespace).to_dict()["items"])
