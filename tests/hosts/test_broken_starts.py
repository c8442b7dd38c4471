"""Starts that break off: the laptop is gone at any moment, and then there is either no job at all or a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import BedJobs

MOMENTS = (0.1, 0.4, 0.6, 0.7, 0.8, 0.9)
"""Parts of a whole start's time after which the laptop is gone."""
SETTLED_SECONDS = 90.0


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> Iterator[BedJobs]:
    laptop = BedJobs(bed, tmp_path)
    yield laptop
    laptop.clear()


def outcome(laptop: BedJobs, name: str) -> str:
    """`nothing` once no host has a trace of the job, `running` once its ranks run everywhere; '' while neither is true."""
    if laptop.traces(0, name) == laptop.traces(1, name) == "":
        return "nothing"
    steps = [laptop.count(number, number) for number in (0, 1)]
    return "running" if all(steps) and laptop.state(name) == "Running" else ""


def test_a_laptop_that_is_gone_in_the_middle_of_a_start_leaves_nothing_or_a_job_that_runs(laptop: BedJobs) -> None:
    path = laptop.job("broken")
    whole, code = laptop.run_until(path, 120.0)
    assert code == 0
    laptop.about("delete", "broken", "--yes")
    outcomes = []
    for moment in MOMENTS:
        laptop.leave()
        laptop.forget("broken")
        seconds = whole * moment
        _, code = laptop.run_until(path, seconds)
        end = eventually(lambda: outcome(laptop, "broken"), seconds=SETTLED_SECONDS)
        outcomes.append(end)
        assert end, (
            f"killed {seconds:.1f} of {whole:.1f} s after the beginning: {laptop.traces(0, 'broken')} | {laptop.traces(1, 'broken')}"
        )
        if end == "running":
            again = laptop.run(path, check=False)
            assert again.returncode == 2 and "runs already on hosts bed0, bed1" in again.stderr
            laptop.about("delete", "broken", "--yes")
    assert outcomes[0] == "nothing", outcomes
