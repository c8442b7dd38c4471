"""A rank that slows down and then freezes, in a real pod."""

from __future__ import annotations

from datetime import datetime

from support.clusters.cluster_jobs import Jobs, until

LIMIT_SECONDS = 6
SCRIPT = """
import json, os, signal, socket, time
rank, attempt = int(os.environ["RANK"]), os.environ["LOCKSTEP_ATTEMPT"]
report = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
report.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
def tell(event, **fields):
    report.send(json.dumps({"event": event, "rank": rank, **fields}).encode())
def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)
if attempt == "2":
    if rank == 0:
        print(open("/workspace/runs/frozen/logs/hang-attempt-1-rank-0.txt").read(), flush=True)
    raise SystemExit
for step in range(1, 41):
    tell("step", step=step)
    tell("pace", step=step, steps=1, microseconds=100_000 * (1 + rank))
    time.sleep(0.4)
if rank == 1:
    freeze()
def wait_for_rank_1():
    time.sleep(600)
wait_for_rank_1()
"""


def test_a_slow_rank_is_told_and_once_frozen_named_written_down_and_the_job_goes_on_in_its_pods(jobs: Jobs) -> None:
    jobs.patch("ConfigMap", "scripts", {"data": {"freeze.py": SCRIPT}})
    jobs.start(
        "frozen",
        "freeze.py",
        hangTimeouts={"stepSeconds": LIMIT_SECONDS},
        restart={"maxRestarts": 1, "backoffSeconds": 0},
    )
    slow = jobs.until_condition("frozen", "Straggling", "True", "SlowRank")
    pods = {pod["metadata"]["name"]: pod for pod in jobs.pods("frozen")}
    assert slow["message"].startswith(f"rank 1 on node 1 ({pods['frozen-1']['spec']['nodeName']}) takes 2.00 times as long as the others")
    until("the restart", lambda: (jobs.job("frozen")["status"] or {}).get("restartHistory"))
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in jobs.pods("frozen")}
    assert before == {name: pod["metadata"]["uid"] for name, pod in pods.items()}
    jobs.until_condition("frozen", "Complete", "True", "Complete")
    status = jobs.job("frozen")["status"]
    failure, (entry,) = status["failure"], status["restartHistory"]
    assert (failure["cause"], failure["rank"], failure["node"], failure["step"]) == ("Hang", 1, 1, 40)
    assert failure["stacks"] == "/workspace/runs/frozen/logs/hang-attempt-1-rank-1.txt"
    assert "its process is stopped (state T)" in failure["message"]
    assert failure["activity"] == "Step after step 40"
    assert (entry["attempt"], entry["cause"]) == (1, "Hang")
    log = until("the last lines", lambda: jobs.get("ConfigMap", "frozen-log"))["data"]["node-0.log"]
    assert "in wait_for_rank_1" in log  # attempt 2 has read what attempt 1 left
    assert datetime.fromisoformat(entry["time"])
    jobs.end("frozen")
