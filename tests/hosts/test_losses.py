"""What happens to a job when its hosts lose their power, their network, their time or a process: it recovers by itself, and no verb calls
it failed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.clusters.demo import demo_folder, sample_file
from lockstep.devcluster.hosts import bed as running
from support.clusters import bed_hosts
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import RANK, BedJobs

LONG_SECONDS = 120.0


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> Iterator[BedJobs]:
    laptop = BedJobs(bed, tmp_path)
    yield laptop
    laptop.clear()


def goes_on(laptop: BedJobs, *, seconds: float = LONG_SECONDS) -> bool:
    """Return True once both ranks have done more steps than now."""
    before = [laptop.count(number, number) for number in (0, 1)]
    return eventually(lambda: all(laptop.count(number, number) > before[number] + 3 for number in (0, 1)), seconds=seconds)


def test_when_all_hosts_lose_their_power_at_once_the_job_goes_on_and_no_restart_is_counted(laptop: BedJobs) -> None:
    laptop.run(laptop.job("dark"))
    assert goes_on(laptop)
    before = [laptop.count(number, number) for number in (0, 1)]
    for number in range(3):
        bed_hosts.power_off(laptop.bed.host(number))
    for number in range(3):
        bed_hosts.power_on(laptop.bed.host(number), wait=False)
    for number in range(3):
        running.await_sshd(laptop.bed.host(number))
    assert goes_on(laptop), "maxRestarts is 0: the loss of machines must not count"
    assert all(laptop.count(number, number) > before[number] for number in (0, 1))
    assert laptop.state("dark") == "Running"
    laptop.about("delete", "dark", "--yes")


def test_a_killed_unit_costs_a_restart_and_the_job_goes_on(laptop: BedJobs) -> None:
    laptop.run(laptop.job("killed", restarts=4))
    assert goes_on(laptop)
    laptop.bed.console(1, "systemctl", "--user", "--machine=ada@", "kill", "--signal=KILL", "lockstep-killed.service")
    assert goes_on(laptop)
    assert laptop.state("killed") == "Running"
    assert 1 <= laptop.status("killed")["restarts"] <= 4
    laptop.about("delete", "killed", "--yes")


@pytest.mark.long
def test_a_cable_that_is_out_and_a_host_that_sleeps_stop_the_job_for_a_while_and_cost_no_restart(laptop: BedJobs) -> None:
    laptop.run(laptop.job("cut"))
    assert goes_on(laptop)
    bed_hosts.plug(laptop.bed.host(1), plugged=False)  # shorter than the silence after which peers stop
    time.sleep(10)
    bed_hosts.plug(laptop.bed.host(1), plugged=True)
    assert goes_on(laptop)
    states = set()
    bed_hosts.plug(laptop.bed.host(1), plugged=False)
    end = time.monotonic() + 34  # longer than it
    while time.monotonic() < end:
        states.add(laptop.state("cut"))
    bed_hosts.plug(laptop.bed.host(1), plugged=True)
    assert goes_on(laptop)
    bed_hosts.freeze(laptop.bed.host(1), frozen=True)
    end = time.monotonic() + 34
    while time.monotonic() < end:
        states.add(laptop.state("cut"))
    bed_hosts.freeze(laptop.bed.host(1), frozen=False)
    assert goes_on(laptop)
    assert "Failed" not in states and laptop.state("cut") == "Running", states
    laptop.about("delete", "cut", "--yes")


@pytest.mark.long
def test_a_cable_that_is_out_for_two_minutes_costs_no_restart(laptop: BedJobs) -> None:
    laptop.run(laptop.job("away"))
    assert goes_on(laptop)
    bed_hosts.plug(laptop.bed.host(1), plugged=False)
    end = time.monotonic() + 120
    states = laptop.states_until("away", lambda: time.monotonic() > end)
    bed_hosts.plug(laptop.bed.host(1), plugged=True)
    assert goes_on(laptop)
    assert "Failed" not in states
    assert laptop.state("away") == "Running"
    laptop.about("delete", "away", "--yes")


@pytest.mark.long
def test_a_host_that_was_off_when_its_job_was_stopped_does_not_train_when_it_comes_back(laptop: BedJobs) -> None:
    laptop.run(laptop.job("quiet"))
    assert goes_on(laptop)
    bed_hosts.power_off(laptop.bed.host(1))
    stopped = laptop.about("stop", "quiet", check=False)
    assert stopped.returncode == 1 and f"Once all hosts answer: lockstep stop quiet --cluster {laptop.cluster}" in stopped.stderr
    bed_hosts.power_on(laptop.bed.host(1), wait=False)
    running.await_sshd(laptop.bed.host(1))
    before = laptop.count(1, 1)
    assert eventually(lambda: "the stop has not reached host bed1" in laptop.about("describe", "quiet").stdout)
    laptop.about("stop", "quiet")
    assert laptop.state("quiet") == "Suspended"
    assert laptop.count(1, 1) == before, "it waits for node 0"
    laptop.about("resume", "quiet")
    assert goes_on(laptop)
    laptop.about("delete", "quiet", "--yes")


@pytest.mark.long
@pytest.mark.parametrize("seconds", [10, 40])
@pytest.mark.parametrize("number", [0, 1])
def test_a_power_cut_of_one_host_is_never_told_as_a_failure_and_the_job_goes_on(laptop: BedJobs, number: int, seconds: int) -> None:
    laptop.run(laptop.job("cut"))
    assert goes_on(laptop)
    host = laptop.bed.host(number)
    bed_hosts.power_off(host)
    back = time.monotonic() + seconds
    states = laptop.states_until("cut", lambda: time.monotonic() > back)
    bed_hosts.power_on(host)
    before = [laptop.count(each, each) for each in (0, 1)]
    states |= laptop.states_until("cut", lambda: all(laptop.count(each, each) > before[each] + 3 for each in (0, 1)))
    assert states and "Failed" not in states, states
    assert laptop.state("cut") == "Running" and not laptop.status("cut").get("restartsCountTowardsMax"), "maxRestarts is 0"
    laptop.about("delete", "cut", "--yes")


JOBS = "/home/ada/.local/state/lockstep/jobs"
MOVED = "/home/ada/lockstep/workspace/runs/moved"
COMMIT = f"""
import os
os.makedirs("{MOVED}/checkpoints/step-2.a" + os.environ["LOCKSTEP_ATTEMPT"])
"""
"""Beginning of a rank's script, which fails if this commit already exists."""


def attempts_on(laptop: BedJobs, number: int) -> list[int]:
    """Attempts that the host's volume has a record of."""
    lines = laptop.bed.console(number, "cat", f"{MOVED}/gang/attempts.jsonl").splitlines()
    return [json.loads(line)["attempt"] for line in lines]


@pytest.mark.long
def test_when_another_host_is_node_0_attempts_are_counted_on_and_no_commit_has_a_name_twice(laptop: BedJobs) -> None:
    path = laptop.job("moved", steps=2)
    for number in (0, 1):
        laptop.put(number, "rank.py", (COMMIT + RANK).encode())
    for first in ("bed0", "bed1", "bed0"):
        laptop.run(path, "--first", first, check=False)  # (it may have ended before it was seen to run)
        assert laptop.becomes("moved", "Complete"), laptop.status("moved")
        laptop.about("delete", "moved")
        for number in (0, 1):
            laptop.bed.console(number, "sh", "-c", "rm -f /home/ada/lockstep/workspace/state-*")
    assert (attempts_on(laptop, 0), attempts_on(laptop, 1)) == ([1, 3], [2])
    for number in (0, 1):
        assert laptop.bed.console(number, "ls", f"{MOVED}/checkpoints").split() == ["step-2.a1", "step-2.a2", "step-2.a3"]


def waits(laptop: BedJobs, number: int, name: str) -> bool:
    """Return True once the job's unit has started on the host, and its agent waits."""
    return eventually(lambda: "waiting for the coordinator" in laptop.bed.console(number, "tail", "-n", "3", f"{JOBS}/{name}/agent.log"))


def test_an_agent_whose_job_was_deleted_without_it_is_removed_by_whoever_looks_next(laptop: BedJobs) -> None:
    laptop.run(laptop.job("gone"))
    laptop.clear(0)  # as a delete does that reaches this host alone
    shown = laptop.type("get", "--cluster", str(laptop.cluster))
    assert "host bed1 did not hear that job gone was deleted: its unit and its files there are removed" in shown.stderr
    assert "gone" not in shown.stdout and laptop.traces(1, "gone") == ""


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_host_that_was_off_when_its_job_was_deleted_keeps_nothing_once_it_is_back(laptop: BedJobs, number: int) -> None:
    laptop.run(laptop.job("late"))
    assert goes_on(laptop)
    bed_hosts.power_off(laptop.bed.host(number))
    deleted = laptop.about("delete", "late", "--yes", check=False)
    assert deleted.returncode == 1 and f"Once all hosts answer: lockstep delete late --cluster {laptop.cluster}" in deleted.stderr
    bed_hosts.power_on(laptop.bed.host(number))
    assert eventually(lambda: "agent.pyz" in laptop.traces(number, "late").partition("jobs/late/")[2]), "its unit has started"
    assert "no files of this start" in laptop.about("describe", "late").stdout
    if number == 0:  # it might as well be a start that broke off
        laptop.about("delete", "late", "--yes")
        assert laptop.traces(0, "late") == laptop.traces(1, "late") == ""
    again = laptop.run(laptop.job("late", steps=2000))  # by the same name
    assert number == 0 or "host bed1 did not hear that job late was deleted" in again.stderr
    assert goes_on(laptop)
    laptop.about("delete", "late", "--yes")
    assert laptop.traces(0, "late") == laptop.traces(1, "late") == ""


@pytest.mark.long
def test_hosts_that_were_off_when_their_job_ended_have_no_key_and_no_unit_that_starts_once_they_are_back(laptop: BedJobs) -> None:
    """One gives up after its own time limit; the next `lockstep get` ends the agent on the other."""
    laptop.cluster.write_text(laptop.cluster.read_text() + "away_seconds: 12\n")
    path = laptop.job("over", nodes=3)
    path.write_text(path.read_text() + "  startTimeoutSeconds: 30\n")
    laptop.run(path)
    assert eventually(lambda: all(laptop.count(number, number) > 3 for number in range(3)))
    for number in (1, 2):
        bed_hosts.power_off(laptop.bed.host(number))
    laptop.states_until("over", lambda: laptop.state("over") == "Failed")
    run = laptop.bed.host(1).disk / "upper" / JOBS.lstrip("/") / "over/run.json"
    run.write_text(run.read_text().replace('"returnSeconds": 12', '"returnSeconds": 86400'))
    for number in (1, 2):
        bed_hosts.power_on(laptop.bed.host(number), wait=False)
    for number in (1, 2):
        running.await_sshd(laptop.bed.host(number))
    units = ["systemctl", "--user", "--machine=ada@"]
    assert eventually(lambda: "this agent ends" in laptop.bed.console(2, "cat", f"{JOBS}/over/agent.log"))
    assert waits(laptop, 1, "over")
    shown = laptop.about("get", "over")
    assert (
        "host bed1 did not hear that job over ended: its unit there is ended, and its key removed" in shown.stderr
        and "Failed" in shown.stdout
    )
    for number in (1, 2):
        assert eventually(lambda number=number: "agent.pyz --run" not in laptop.traces(number, "over"))
        assert "key" not in laptop.bed.console(number, "ls", f"{JOBS}/over").split()
        state = laptop.bed.console(number, "sh", "-c", f"{' '.join(units)} is-enabled lockstep-over.service || true")
        assert state.strip() == "disabled"
    assert laptop.state("over") == "Failed"
    laptop.about("delete", "over", "--yes")


def trained(laptop: BedJobs, name: str) -> Path:
    """Put the demo's model and texts on both hosts, outside the workspace; the job file of a training that commits often, each shard on two
    hosts.
    """
    demo = demo_folder()
    for source in (demo / "models/tiny-base", demo / "datasets/demo.jsonl"):
        laptop.type("cp", str(source), f"{name}:/datasets/{source.name}", "--cluster", str(laptop.cluster))
    path = laptop.folder / f"{name}.yaml"
    text = sample_file().read_text().replace("name: demo", f"name: {name}").replace("/workspace/models/", "/datasets/")
    text = text.replace("maxSteps: 100", "maxSteps: 40").replace("everySteps: 20", "everySteps: 5")
    path.write_text(text.rstrip("\n") + "\n      replicas: 2\n")
    return path


def ended_well(laptop: BedJobs, name: str, *, node_0: int = 0) -> tuple[Any, str]:
    """Wait for the job's end; its evaluations' losses, and the digest of its adapter's weights on the host of node 0."""
    laptop.type("wait", name, "--cluster", str(laptop.cluster), "--for", "Complete", "--timeout", "400")
    result = laptop.status(name)["result"]
    weights = f"/home/ada/lockstep/workspace/runs/{name}/adapter/adapter_model.safetensors"
    return (result["evalLossBefore"], result["evalLossAfter"]), laptop.bed.console(node_0, "sha256sum", weights).split()[0]


def committed(laptop: BedJobs, name: str) -> int:
    return int((laptop.status(name).get("checkpoint") or {}).get("lastCommittedStep") or 0)


@pytest.fixture(scope="module")
def undisturbed(own_hosts: BedHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """Losses and adapter of a training that nothing disturbs."""
    laptop = BedJobs(own_hosts, tmp_path_factory.mktemp("undisturbed"))
    try:
        laptop.run(trained(laptop, "whole"))
        yield ended_well(laptop, "whole")
    finally:
        laptop.clear()


@pytest.mark.long
def test_a_workspace_that_is_wiped_in_the_middle_changes_no_bit_of_a_training_that_keeps_copies(
    laptop: BedJobs, undisturbed: tuple[Any, str]
) -> None:
    laptop.run(trained(laptop, "wiped"))
    assert eventually(lambda: committed(laptop, "wiped") >= 10, seconds=LONG_SECONDS)
    host = laptop.bed.host(1)
    bed_hosts.power_off(host)
    for path in (host.disk / "upper/home/ada/lockstep/workspace").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    bed_hosts.power_on(host)
    assert ended_well(laptop, "wiped") == undisturbed
    status = laptop.status("wiped")
    assert status["restarts"] >= 1 and not status.get("restartsCountTowardsMax")
    laptop.about("delete", "wiped")


@pytest.mark.long
def test_a_training_whose_node_0_becomes_another_host_goes_on_bit_by_bit_and_writes_no_commit_twice(
    laptop: BedJobs, undisturbed: tuple[Any, str]
) -> None:
    path = trained(laptop, "turned")
    laptop.run(path)
    assert eventually(lambda: committed(laptop, "turned") >= 10, seconds=LONG_SECONDS)
    laptop.about("delete", "turned", "--yes")
    folder = "/home/ada/lockstep/workspace/runs/turned/checkpoints"
    before = set(laptop.bed.console(0, "ls", folder).split())
    laptop.run(path, "--first", "bed1")
    assert ended_well(laptop, "turned", node_0=1) == undisturbed
    names = {name for number in (0, 1) for name in laptop.bed.console(number, "ls", folder).split() if name.startswith("step-")}
    later = names - before
    assert later and all(name.endswith(".a2") for name in later), "the first start's were of attempt 1"
    laptop.about("delete", "turned")
