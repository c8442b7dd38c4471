"""What happens to a job when its hosts lose their power, their network, their time or a process: it recovers by itself, and no verb calls it failed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.devcluster.hosts import bed as running
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import BedJobs

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
        running.power_off(laptop.bed.host(number))
    for number in range(3):
        running.power_on(laptop.bed.host(number), wait=False)
    for number in range(3):
        running.await_sshd(laptop.bed.host(number))
    assert goes_on(laptop), "maxRestarts is 0: the loss of machines must not count"
    assert all(laptop.count(number, number) > before[number] for number in (0, 1))
    assert laptop.state("dark") == "Running"
    laptop.about("delete", "dark", "--yes")


def test_a_drill_kills_a_rank_and_an_agent_and_measures_until_all_ranks_run_again(laptop: BedJobs) -> None:
    laptop.run(laptop.job("drilled", restarts=4))
    for fault, named in (("kill-rank", "Killed: rank 1 on node 1 was ended by SIGKILL"), ("lose-node", "node 1")):
        assert goes_on(laptop)
        told = laptop.type("drill", fault, "--job", "drilled", "--cluster", str(laptop.cluster), "--yes", "-o", "json")
        outcome = json.loads(told.stdout)
        assert named in outcome["named"] and outcome["stopped_seconds"] < outcome["started_seconds"]
        assert f"{fault}: done to rank 1 on node 1" in told.stderr
    assert laptop.status("drilled")["attempts"] == 3
    laptop.about("delete", "drilled", "--yes")


def test_a_killed_rank_agent_and_unit_cost_a_restart_each_and_the_job_goes_on(laptop: BedJobs) -> None:
    laptop.run(laptop.job("killed", restarts=4))
    for number, command in (
        (1, ["pkill", "-KILL", "-f", "rank.py"]),
        (0, ["pkill", "-KILL", "-f", "agent.pyz --run .*/killed/"]),
        (1, ["systemctl", "--user", "--machine=ada@", "kill", "--signal=KILL", "lockstep-killed.service"]),
    ):
        assert goes_on(laptop)
        laptop.bed.console(number, *command)
    assert goes_on(laptop)
    assert laptop.state("killed") == "Running"
    assert 1 <= laptop.status("killed")["restarts"] <= 4
    laptop.about("delete", "killed", "--yes")


@pytest.mark.long
def test_a_cable_that_is_out_and_a_host_that_sleeps_stop_the_job_for_a_while_and_cost_no_restart(laptop: BedJobs) -> None:
    laptop.run(laptop.job("cut"))
    assert goes_on(laptop)
    running.plug(laptop.bed.host(1), plugged=False)  # shorter than the silence after which peers stop
    time.sleep(10)
    running.plug(laptop.bed.host(1), plugged=True)
    assert goes_on(laptop)
    states = set()
    running.plug(laptop.bed.host(1), plugged=False)
    end = time.monotonic() + 34  # longer than it
    while time.monotonic() < end:
        states.add(laptop.state("cut"))
    running.plug(laptop.bed.host(1), plugged=True)
    assert goes_on(laptop)
    running.freeze(laptop.bed.host(1), frozen=True)
    end = time.monotonic() + 34
    while time.monotonic() < end:
        states.add(laptop.state("cut"))
    running.freeze(laptop.bed.host(1), frozen=False)
    assert goes_on(laptop)
    assert "Failed" not in states and laptop.state("cut") == "Running", states
    laptop.about("delete", "cut", "--yes")


@pytest.mark.long
def test_a_cable_that_is_out_for_two_minutes_costs_no_restart(laptop: BedJobs) -> None:
    laptop.run(laptop.job("away"))
    assert goes_on(laptop)
    states = set()
    running.plug(laptop.bed.host(1), plugged=False)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        states.add(laptop.state("away"))
        time.sleep(1)
    running.plug(laptop.bed.host(1), plugged=True)
    assert goes_on(laptop)
    assert "Failed" not in states
    assert laptop.state("away") == "Running"
    laptop.about("delete", "away", "--yes")


@pytest.mark.long
def test_a_host_that_was_off_when_its_job_was_stopped_does_not_train_when_it_comes_back(laptop: BedJobs) -> None:
    laptop.run(laptop.job("quiet"))
    assert goes_on(laptop)
    running.power_off(laptop.bed.host(1))
    stopped = laptop.about("stop", "quiet", check=False)
    assert stopped.returncode == 1 and f"Once all hosts answer: lockstep stop quiet --cluster {laptop.cluster}" in stopped.stderr
    running.power_on(laptop.bed.host(1), wait=False)
    running.await_sshd(laptop.bed.host(1))
    before = laptop.count(1, 1)
    assert eventually(lambda: "nobody has told host bed1 to stop" in laptop.about("describe", "quiet").stdout)
    laptop.about("stop", "quiet")
    assert laptop.state("quiet") == "Suspended"
    assert laptop.count(1, 1) == before, "it waits for node 0"
    laptop.about("resume", "quiet")
    assert goes_on(laptop)
    laptop.about("delete", "quiet", "--yes")
