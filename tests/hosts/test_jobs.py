"""A job on hosts over ssh, from its start to its end: real agents as systemd's user units, each on a machine of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import BedJobs


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> BedJobs:
    return BedJobs(bed, tmp_path)


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
