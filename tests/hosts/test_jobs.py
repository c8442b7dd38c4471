"""A job on hosts over ssh, from its start to its end: real agents as systemd's user units, each on a machine of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.devcluster.hosts import bed as running
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import JOB, BedJobs
from support.verb_words import HOSTS, JOBS, STOPPED, UNDISTURBED, Where, differences, script


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> BedJobs:
    laptop = BedJobs(bed, tmp_path)
    laptop.clear()
    return laptop


def test_a_job_runs_to_its_end_and_leaves_only_its_records(laptop: BedJobs) -> None:
    done = laptop.run(laptop.job("short", steps=10))
    assert "short: Running: all ranks run" in done.stdout
    assert laptop.type("wait", "short", "--cluster", str(laptop.cluster), "--for", "Complete").returncode == 0
    assert "[rank 1] from step 0" in laptop.about("logs", "short", "--node", "1").stdout
    for number in (0, 1):
        assert eventually(
            lambda number=number: "agent.pyz" not in laptop.bed.console(number, "sh", "-c", "pgrep -af [a]gent.pyz || true")
        ), "no agent is left"
        assert laptop.bed.console(number, "sh", "-c", "ls /home/ada/.local/state/lockstep/jobs/short/").split() == [
            "agent.log",
            "agent.pyz",
            "job.json",
            "run.json",
        ], "the key is gone"
    assert "is deleted" in laptop.about("delete", "short").stdout
    assert laptop.traces(0, "short") == laptop.traces(1, "short") == ""


def test_a_stop_saves_everywhere_and_a_resume_goes_on_from_there(laptop: BedJobs) -> None:
    laptop.run(laptop.job("stopped"))
    assert eventually(lambda: laptop.count(1, 1) > 3)
    rows = [line.split()[:3] for line in laptop.about("top", "stopped", "--once").stdout.splitlines()]
    assert ["0", "bed0", "0"] in rows and ["1", "bed1", "1"] in rows, "nodes, their hosts and ranks"
    hosts = {line.split()[0]: line for line in laptop.type("top", "--once", "--cluster", str(laptop.cluster)).stdout.splitlines() if line}
    assert "stopped (rank 1)" in hosts["bed1"] and "stopped" not in hosts["bed2"]
    assert "rank 1: main thread" in laptop.about("stacks", "stopped", "--rank", "1").stdout
    assert "stopped as asked" in laptop.about("stop", "stopped").stdout
    before = laptop.count(0, 0)
    assert laptop.state("stopped") == "Suspended"
    laptop.about("resume", "stopped")
    assert eventually(lambda: laptop.count(0, 0) > before + 3)
    assert f"from step {before}" in laptop.about("logs", "stopped").stdout
    refused = laptop.run(laptop.job("stopped"), check=False)
    assert refused.returncode == 2 and "runs already on hosts bed0, bed1" in refused.stderr
    laptop.about("delete", "stopped", "--yes")
    assert laptop.traces(0, "stopped") == laptop.traces(1, "stopped") == ""


def test_a_host_that_loses_its_power_comes_back_by_itself_and_costs_no_restart(laptop: BedJobs) -> None:
    laptop.run(laptop.job("power"))
    assert eventually(lambda: laptop.count(1, 1) > 3)
    running.power_off(laptop.bed.host(1))
    running.power_on(laptop.bed.host(1))
    before = laptop.count(1, 1)
    assert eventually(lambda: laptop.count(1, 1) > before + 3), "maxRestarts is 0: the loss of a machine must not count"
    assert laptop.state("power") == "Running"
    laptop.about("delete", "power", "--yes")


def test_hosts_that_do_not_answer_are_told_as_unreachable_and_never_as_failed(laptop: BedJobs) -> None:
    laptop.run(laptop.job("away"))
    assert eventually(lambda: "trainer" in laptop.status("away"))
    for number in (0, 1):
        running.plug(laptop.bed.host(number), plugged=False)
        assert laptop.state("away") == "Unreachable"
    why = laptop.about("why", "away", check=False)
    assert why.returncode == 1 and "host bed0 can't be reached" in why.stdout and "last known: Running, step " in why.stdout
    for number in (0, 1):
        running.plug(laptop.bed.host(number), plugged=True)
    assert laptop.becomes("away", "Running")
    laptop.about("delete", "away", "--yes")


@pytest.mark.long
def test_verbs_about_jobs_on_hosts_say_what_they_say_elsewhere(bed: BedHosts, tmp_path: Path) -> None:
    laptop = BedJobs(bed, tmp_path)
    laptop.clear()
    try:
        for name, path in JOBS.items():
            for number in range(bed.count):
                laptop.put(number, path, script(name).encode())
            file = tmp_path / f"{name}.yaml"
            file.write_text(JOB.format(name=name, nodes=2, steps=1, restarts=0).replace("rank.py", path))
            laptop.run(file, check=False)  # (two of them may have ended before they were seen to run)
        assert laptop.becomes("done", "Complete") and laptop.becomes("broke", "Failed") and laptop.becomes("runs", "Running")
        name = f"beds{bed.layout.index}"
        where = Where(
            HOSTS, ("--cluster", str(laptop.cluster)), f"on the hosts of {name}", have="they have", folder="/home/ada/lockstep/workspace", node="host bed0"
        )  # fmt: skip
        assert differences(where, UNDISTURBED, tmp_path) == []
        assert differences(where, STOPPED, tmp_path) == []
    finally:
        laptop.clear()
