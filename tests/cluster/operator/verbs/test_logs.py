"""What a person reads of a job's ranks: while it runs, of the attempt before, and after its end. One job for all."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.operator.verbs.test_verbs import lockstep
from lockstep.kube.cluster import Cluster
from lockstep.platforms.files.reader import beside
from lockstep.programs import output_of
from support.clusters.cluster_jobs import Jobs, until

SCRIPT = """\
import os, time
rank, attempt = os.environ["RANK"], os.environ["LOCKSTEP_ATTEMPT"]
print("rank", rank, "of attempt", attempt, flush=True)
while not os.path.exists("/workspace/go-" + attempt):
    time.sleep(0.1)
if attempt == "1" and rank == "3":
    raise ValueError("the data is not there")
if attempt == "1":
    time.sleep(600)
print("rank", rank, "is done", flush=True)
"""


def go(jobs: Jobs, attempt: int) -> None:
    """Let the ranks of this attempt go on."""

    async def touch() -> None:
        async with await Cluster.connect() as cluster, beside(cluster, jobs.namespace, "printed") as place:
            await output_of(place, ["touch", f"/workspace/go-{attempt}"])

    asyncio.run(touch())


@pytest.fixture(scope="module")
def again(jobs: Jobs) -> Iterator[str]:
    """Two nodes of two ranks; rank 3 has failed once, and attempt 2 waits."""
    jobs.patch("ConfigMap", "scripts", {"data": {"printed.py": SCRIPT}})
    jobs.start("printed", script="printed.py", ranksPerNode=2, restart={"maxRestarts": 1, "backoffSeconds": 0})
    jobs.until_running("printed")
    go(jobs, 1)
    until(
        "attempt 2",
        lambda: jobs.job("printed")["status"].get("attempts") == 2 and jobs.condition("printed", "Progressing")["reason"] == "Running",
        120,
    )
    yield "printed"
    jobs.end("printed")


def following(jobs: Jobs, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lockstep.cli.main", "logs", "printed", "-f", *options, "-n", jobs.namespace]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def readers(jobs: Jobs) -> list[str]:
    pods = jobs.kind("Pod").get(namespace=jobs.namespace).to_dict()["items"]
    return [pod["metadata"]["name"] for pod in pods if "reader" in pod["metadata"]["name"] and not pod["metadata"].get("deletionTimestamp")]


def test_a_rank_s_lines_are_found_wherever_it_is_and_of_every_attempt(jobs: Jobs, again: str) -> None:
    told = lockstep(jobs, "logs", again, "--rank", "3")
    lines = told.stdout.splitlines()
    assert lines[0] == "[rank 3] rank 3 of attempt 1" and lines[-1] == "[rank 3] rank 3 of attempt 2", told
    assert all(line.startswith("[rank 3] ") for line in lines)
    node = lockstep(jobs, "logs", again, "--node", "1", "--tail", "2").stdout.splitlines()
    assert sorted(node) == ["[rank 2] rank 2 of attempt 2", "[rank 3] rank 3 of attempt 2"]


def test_the_attempt_before_is_read_from_the_volume(jobs: Jobs, again: str) -> None:
    def lines() -> list[str]:
        return lockstep(jobs, "logs", again, "--previous", "--rank", "3").stdout.splitlines()

    until("the end of attempt 1 on the volume, which an agent writes from time to time", lambda: "ValueError" in "".join(lines()[-1:]), 60)
    first, *_, last = lines()
    assert (first, last) == ("[rank 3] rank 3 of attempt 1", "[rank 3] ValueError: the data is not there")
    told = lockstep(jobs, "logs", again, "--errors").stdout
    assert told.startswith("first: rank 3 on node 1 (UserCode): exited with 1: ValueError: the data is not there\n  | ")
    assert not readers(jobs)


def test_top_shows_each_node_with_its_ranks_its_memory_and_what_its_nics_carry(jobs: Jobs, again: str) -> None:
    told = lockstep(jobs, "top", again, "-o", "json")
    found = json.loads(told.stdout)
    assert [(node["pod"], node["ranks"], node["ranksRunning"]) for node in found["nodes"]] == [
        ("printed-0", [0, 1], [0, 1]),
        ("printed-1", [2, 3], [2, 3]),
    ]
    assert all(node["memory"]["bytes"] > 1 << 20 and "eth0" in node["gigabits"] and node["nodeName"] for node in found["nodes"]), found
    loads = [load for node in found["nodes"] for load in node["rankLoads"]]
    assert [load["rank"] for load in loads] == [0, 1, 2, 3] and all(load["bytes"] > 1 << 20 and load["cores"] >= 0 for load in loads), found
    assert all(node["cpu"]["limitCores"] > 0 for node in found["nodes"]), found
    told = lockstep(jobs, "top", again)
    assert told.stdout.startswith("printed  Running  ") and "attempt 2, 1 restart" in told.stdout
    assert "Traceback" not in told.stderr
    assert "printed" in lockstep(jobs, "top").stdout


def test_who_follows_hears_all_and_learns_the_end_and_who_has_enough_can_leave(jobs: Jobs, again: str) -> None:
    whole, left = following(jobs, "--rank", "2"), following(jobs)
    first = [left.stdout.readline(), whole.stdout.readline()]
    left.send_signal(signal.SIGINT)
    go(jobs, 2)
    rest, said = whole.communicate(timeout=180)
    _, complained = left.communicate(timeout=180)
    assert first[1].startswith("[rank 2] ") and rest.splitlines()[-1] == "[rank 2] rank 2 is done"
    assert (whole.returncode, left.returncode) == (0, 130), said
    assert "Traceback" not in complained


def test_after_the_end_its_last_lines_are_at_hand_and_all_of_them_on_its_volume(jobs: Jobs, again: str) -> None:
    jobs.until_condition(again, "Complete", "True", "Complete", 60)
    until("the pods are gone", lambda: not jobs.pods(again), 60)
    assert "Complete" in lockstep(jobs, "logs", again, "--tail", "3").stdout
    told = lockstep(jobs, "logs", again, "--rank", "3")
    assert told.stdout.splitlines()[0] == "[rank 3] rank 3 of attempt 1" and "[rank 3] rank 3 is done" in told.stdout, told.stderr
    assert not readers(jobs)
    assert lockstep(jobs, "logs", again, "-f", "--tail", "1").returncode == 0
