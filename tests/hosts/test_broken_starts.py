"""Starts that break off: the laptop is gone at any moment, and then there is either no job at all or a whole one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def outcomes_of(laptop: BedJobs, moments: Sequence[float]) -> list[str]:
    """Start a job once for each moment, and lose the laptop then; what became of each start."""
    path = laptop.job("broken")
    whole, code = laptop.run_until(path, 120.0)
    assert code == 0
    laptop.about("delete", "broken", "--yes")
    outcomes = []
    for moment in moments:
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
    return outcomes


@pytest.mark.long
def test_a_laptop_that_is_gone_in_the_middle_of_a_start_leaves_nothing_or_a_job_that_runs(laptop: BedJobs) -> None:
    assert outcomes_of(laptop, MOMENTS)[0] == "nothing"


@pytest.mark.long
def test_a_laptop_that_is_gone_at_any_of_twenty_moments_leaves_nothing_or_a_job_that_runs(laptop: BedJobs) -> None:
    draw = random.Random(20)  # noqa: S311 (no secret)
    outcomes = outcomes_of(laptop, [draw.random() for _ in range(20)])
    assert set(outcomes) == {"nothing", "running"}, outcomes


def test_of_two_starts_at_once_no_more_than_one_begins_and_the_other_says_so(laptop: BedJobs) -> None:
    path, where = laptop.job("twice"), ("--cluster", str(laptop.cluster))
    with ThreadPoolExecutor(2) as both:
        ended = list(both.map(lambda _: laptop.start("run", "-f", str(path), *where, "--detach", check=False), range(2)))
    refused = [one for one in ended if one.returncode != 0]
    assert refused, "two jobs of one name"
    for one in refused:
        assert (
            "another start of job twice is under way" in one.stderr or "runs already" in one.stderr or "runs there already" in one.stderr
        ), one.stderr
    end = eventually(lambda: outcome(laptop, "twice"), seconds=SETTLED_SECONDS)
    assert end == ("nothing" if len(refused) == 2 else "running")


def test_of_two_resumes_at_once_no_agent_is_started_twice_and_the_other_says_so(laptop: BedJobs) -> None:
    laptop.run(laptop.job("again"))
    laptop.about("stop", "again")
    with ThreadPoolExecutor(2) as both:
        ended = list(both.map(lambda _: laptop.start("resume", "again", "--cluster", str(laptop.cluster), check=False), range(2)))
    refused = [one for one in ended if one.returncode != 0]
    for one in refused:
        assert "another start of job again is under way" in one.stderr or "runs there already" in one.stderr, one.stderr
    if len(refused) == 2:  # (each saw the other's; the hosts say for how long)
        again = ("resume", "again", "--cluster", str(laptop.cluster))
        assert eventually(lambda: laptop.start(*again, check=False).returncode == 0)
    assert laptop.becomes("again", "Running")
    assert laptop.status("again")["attempts"] == 2, "one before the stop, and one after it"
