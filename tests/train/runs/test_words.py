"""What every place is asked (`verb_words`, `verb_stages`), of the places on this machine: `--local`, and the place of one file
(`support/places/processes.py`), which shows what a place takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.platforms.jobs import runs
from lockstep.platforms.places import backends
from support.places.processes import Processes
from support.places.verb_stages import BREAKS, answers_about_a_log_of, breaks_at_each_step, ctrl_c_leaves_what_the_next_goes_on_from
from support.places.verb_words import HERE, PROCESSES, Where, live, live_at_the_limits, workspace

START = """
import sys
from lockstep.cli.main import main
from lockstep.platforms.places import backends
backends.BACKENDS[backends.LOCAL] = "support.places.processes:Processes"
sys.exit(main())
"""


@pytest.fixture(params=[HERE, PROCESSES])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    """A place with the scripts of the jobs. What is left of them is ended."""
    root = workspace(tmp_path / "place")
    there = Where(request.param, ("--cluster", str(root)), f"in workspace {root}", elsewhere="; --cluster names another one", root=root)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.2)
    if request.param == HERE:
        yield there
        return
    monkeypatch.setitem(backends.BACKENDS, backends.LOCAL, "support.places.processes:Processes")
    yield replace(there, program=("-c", START))
    for job in Processes(root).jobs():
        job.suspend(now=True)
        job.delete()


def test_jobs_live_as_they_do_elsewhere(where: Where, tmp_path: Path) -> None:
    live(where, tmp_path)


def test_names_paths_and_arguments_at_their_limits_reach_jobs_as_they_are(where: Where, tmp_path: Path) -> None:
    live_at_the_limits(where, tmp_path)


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.long] * (how == "away")) for how in BREAKS])
def test_a_start_that_breaks_at_any_step_leaves_a_whole_job_or_none(how: str, where: Where, tmp_path: Path) -> None:
    assert breaks_at_each_step(where, tmp_path, BREAKS[how]) >= 4


def test_ctrl_c_while_a_job_is_followed_says_what_goes_on(where: Where, tmp_path: Path) -> None:
    ctrl_c_leaves_what_the_next_goes_on_from(where, tmp_path)


@pytest.mark.parametrize("megabytes", [64, pytest.param(1000, marks=pytest.mark.long)])
def test_a_log_of_any_size_is_read_in_little_memory(megabytes: int, where: Where, tmp_path: Path) -> None:
    answers_about_a_log_of(megabytes, where, tmp_path)
