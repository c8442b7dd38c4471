"""A job on hosts over ssh, from its start to its end: real agents as systemd's user units, each on a machine of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.clusters import bed_hosts
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import BedJobs, Crowd
from support.places.verb_words import HOSTS, PROGRAMS, Where, live, live_at_the_limits
from support.release.version_before import program_before


def listening(bed: BedHosts, number: int) -> set[tuple[str, int]]:
    """Addresses and ports that somebody listens on in the host."""
    lines = bed.console(number, "ss", "-Hltn").splitlines()
    ends = [line.split()[3].rpartition(":") for line in lines]
    return {(address, int(port)) for address, _, port in ends}


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> BedJobs:
    laptop = BedJobs(bed, tmp_path)
    laptop.clear()
    return laptop


def test_a_job_runs_to_its_end_leaves_only_its_records_and_is_deleted_with_its_files(laptop: BedJobs) -> None:
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
    runs = [laptop.bed.console(number, "ls", "/home/ada/lockstep/workspace/runs").split() for number in (0, 1)]
    assert all("short" in names for names in runs)
    deleted = laptop.about("delete", "short", "--files", "--yes").stdout
    assert "/workspace/runs/short is removed" in deleted and "short is deleted with its files" in deleted
    assert laptop.traces(0, "short") == laptop.traces(1, "short") == ""
    for number, names in enumerate(runs):
        left = laptop.bed.console(number, "ls", "/home/ada/lockstep/workspace/runs").split()
        assert sorted(left) == sorted(set(names) - {"short"}), "what other jobs left stays"


def test_a_job_whose_files_cannot_be_read_hides_no_other_and_is_not_started_over(laptop: BedJobs) -> None:
    laptop.run(laptop.job("well", steps=3))
    shut = "/home/ada/.local/state/lockstep/jobs/shut"
    laptop.bed.console(1, "sh", "-c", f"mkdir -p {shut} && echo '{{}}' > {shut}/job.json && chmod 000 {shut} && chown -R ada:ada {shut}")
    try:
        shown = laptop.type("get", "--cluster", str(laptop.cluster), check=False)
        assert "well" in shown.stdout and f"host bed1: the files of job shut there can't be read: {shut}" in shown.stderr + shown.stdout
        refused = laptop.run(laptop.job("shut"), check=False)
        assert refused.returncode == 2 and "Permission denied" in refused.stderr and "move away" in refused.stderr
        assert laptop.traces(0, "shut") == "", "nothing was sent"
    finally:
        laptop.bed.console(1, "sh", "-c", f"chmod 700 {shut}; rm -r {shut}")
    laptop.about("delete", "well", "--yes")


def test_a_gpu_tool_that_fails_is_told_and_its_host_not_trained_on_as_one_without_gpus(laptop: BedJobs) -> None:
    stub = "/usr/local/bin/nvidia-smi"
    laptop.bed.console(
        1, "sh", "-c", f"cat > {stub}; chmod 755 {stub}", stdin=b"#!/bin/sh\necho 'Unable to determine the device handle'; exit 15\n"
    )
    try:
        path = laptop.job("lost")
        path.write_text(path.read_text().replace("  ranksPerNode: 1\n  gpusPerNode: 0\n", ""))
        refused = laptop.run(path, check=False)
        assert refused.returncode == 2 and "host bed1: its GPUs are not all known: nvidia-smi ends with 15: Unable" in refused.stderr
        assert "nvidia-smi ends with 15" in laptop.type("doctor", str(laptop.cluster), check=False).stdout
    finally:
        laptop.bed.console(1, "rm", stub)


def test_systemd_gets_the_memory_that_a_job_states_and_a_start_names_hosts_that_can_not_keep_it(laptop: BedJobs) -> None:
    begun = laptop.run(laptop.job("small"), "--set", "resources.memory=1Gi")
    of_unit = laptop.bed.ssh(1, "systemctl", "--user", "show", "--property=MemoryMax", "lockstep-small.service").stdout
    assert of_unit == "MemoryMax=1073741824\n"
    controllers = laptop.bed.console(
        1, "sh", "-c", "cat /sys/fs/cgroup/user.slice/user-$(id -u ada).slice/user@*.service/cgroup.controllers"
    )
    told = "spec.resources (memory 1Gi) is not kept on hosts bed0, bed1: units of ada have no control over memory there"
    assert (told in begun.stderr) == ("memory" not in controllers.split())
    laptop.about("delete", "small", "--yes")


def test_a_stop_saves_everywhere_and_a_resume_goes_on_from_there(laptop: BedJobs) -> None:
    laptop.run(laptop.job("stopped"))
    assert eventually(lambda: laptop.count(1, 1) > 3)
    hosts = {line.split()[0]: line for line in laptop.type("top", "--once", "--cluster", str(laptop.cluster)).stdout.splitlines() if line}
    assert "stopped (rank 1)" in hosts["bed1"] and "stopped" not in hosts["bed2"]
    assert "stopped as asked" in laptop.about("stop", "stopped").stdout
    before = laptop.count(0, 0)
    assert laptop.state("stopped") == "Suspended"
    laptop.about("resume", "stopped")
    assert eventually(lambda: laptop.count(0, 0) > before + 3)
    assert f"from step {before}" in laptop.about("logs", "stopped").stdout
    laptop.about("delete", "stopped", "--yes")
    assert laptop.traces(0, "stopped") == laptop.traces(1, "stopped") == ""


def test_a_host_that_loses_its_power_is_named_in_the_list_and_comes_back_by_itself_and_costs_no_restart(laptop: BedJobs) -> None:
    laptop.run(laptop.job("power"))
    assert eventually(lambda: laptop.count(1, 1) > 3)
    bed_hosts.power_off(laptop.bed.host(1))
    listed = laptop.type("get", "--cluster", str(laptop.cluster), check=False)
    assert listed.returncode == 1 and "\npower " in listed.stdout
    assert "host bed1 has not answered 12 s after the others: what is shown may lack jobs" in listed.stderr
    bed_hosts.power_on(laptop.bed.host(1))
    before = laptop.count(1, 1)
    assert eventually(lambda: laptop.count(1, 1) > before + 3), "maxRestarts is 0: the loss of a machine must not count"
    assert laptop.state("power") == "Running"
    laptop.about("delete", "power", "--yes")


def test_a_job_of_the_version_before_is_followed_stopped_and_resumed(laptop: BedJobs, tmp_path: Path) -> None:
    laptop.LOCKSTEP = program_before(tmp_path / "before")
    laptop.start("run", "-f", str(laptop.job("old", steps=40)), "--cluster", str(laptop.cluster), "--detach")
    assert eventually(lambda: laptop.count(1, 1) > 3)
    assert laptop.state("old") == "Running"
    assert "[rank 1] from step 0" in laptop.about("logs", "old", "--node", "1").stdout
    assert "old" in laptop.type("top", "--once", "--cluster", str(laptop.cluster)).stdout
    assert "stopped as asked" in laptop.about("stop", "old").stdout
    before = laptop.count(0, 0)
    assert laptop.state("old") == "Suspended"
    laptop.about("resume", "old")
    assert laptop.about("wait", "old", "--for", "Complete").returncode == 0
    assert f"from step {before}" in laptop.about("logs", "old").stdout and laptop.count(0, 0) == 40
    laptop.about("delete", "old", "--yes")
    assert laptop.traces(0, "old") == laptop.traces(1, "old") == ""


@pytest.mark.long
def test_hosts_that_do_not_answer_are_told_as_unreachable_and_never_as_failed(laptop: BedJobs) -> None:
    laptop.run(laptop.job("away"))
    assert eventually(lambda: "trainer" in laptop.status("away"))
    for number in (0, 1):
        bed_hosts.plug(laptop.bed.host(number), plugged=False)
        assert laptop.state("away") == "Unreachable"
    why = laptop.about("why", "away", check=False)
    assert why.returncode == 1 and "host bed0 can't be reached" in why.stdout and "last known: Running, step " in why.stdout
    for number in (0, 1):
        bed_hosts.plug(laptop.bed.host(number), plugged=True)
    assert laptop.becomes("away", "Running")
    laptop.about("delete", "away", "--yes")


@pytest.mark.long
def test_jobs_of_two_users_run_on_the_same_hosts_at_once_and_share_nothing(bed: BedHosts, laptop: BedJobs, tmp_path: Path) -> None:
    (tmp_path / "bob").mkdir()
    other = BedJobs(bed, tmp_path / "bob", "bob")
    other.clear()
    try:
        before = [listening(bed, number) for number in range(2)]
        laptop.run(laptop.job("hers", steps=60))
        stated = (bed.host(0).address, bed.host(1).address)
        opened = [listening(bed, number) - before[number] for number in range(2)]
        assert opened[0], "the coordinator listens"
        for address, mine in zip(stated, opened, strict=True):
            within = [port for at, port in mine if at == "127.0.0.1"]
            assert len(within) == 1, f"each agent hears its own ranks' progress within the host: {opened}"
            assert all(at == address and 29400 <= port <= 29499 for at, port in mine if at != "127.0.0.1"), opened
        other.run(other.job("his", steps=60))
        for reader, owner, name in (("bob", "ada", "hers"), ("ada", "bob", "his")):
            folder = f"/home/{owner}/.local/state/lockstep/jobs/{name}"
            for file in ("key", "run.json", "agent.log", "job.json"):
                bed.console(0, "test", "-s", f"{folder}/{file}")
                assert "Permission denied" in bed.ssh(0, "cat", f"{folder}/{file}", user=reader).stderr, (reader, file)
        for user, name in ((laptop, "hers"), (other, "his")):
            assert user.becomes(name, "Complete")
            assert user.count(1, 1) == 60
    finally:
        other.clear()


@pytest.mark.long
def test_jobs_on_hosts_live_as_jobs_do_elsewhere(laptop: BedJobs, tmp_path: Path) -> None:
    for path, text in PROGRAMS.items():
        for number in range(laptop.bed.count):
            laptop.put(number, path, text.encode())
    where = Where(
        HOSTS, ("--cluster", str(laptop.cluster)), f"on the hosts of beds{laptop.bed.layout.index}", have="they have",
            folder="/home/ada/lockstep/workspace", node="host bed0",
    )  # fmt: skip
    try:
        live(where, tmp_path)
        live_at_the_limits(where, tmp_path)
    finally:
        laptop.clear()


@pytest.mark.long
def test_a_job_on_32_hosts_is_checked_and_runs_to_its_end(bed: BedHosts, tmp_path: Path) -> None:
    """Eleven of them behind each sshd, which lets only ten logins begin at once."""
    with Crowd(bed, tmp_path, 32) as laptop:
        found = json.loads(laptop.type("doctor", str(laptop.cluster), "-o", "json", check=False).stdout)
        assert len(found["hosts"]) == 32 and not [one for one in found["findings"] if one["outcome"] == "failed"], found["findings"]
        laptop.run(laptop.crowded_job("crowded", steps=5))
        assert laptop.becomes("crowded", "Complete")
        laptop.about("delete", "crowded", "--yes")
