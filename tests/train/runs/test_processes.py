"""A place of one file (`support/places/processes.py`) answers every verb as others do, and keeps its jobs whatever happens."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.objects import Typed
from lockstep.assets import asset
from lockstep.platforms.places import backends
from lockstep.platforms.places.orders import Order
from support.clusters.bed_jobs import JOB
from support.clusters.cluster_jobs import SCRIPTS
from support.places.processes import Processes, ProcessJob
from support.verb_words import JOBS, PROCESSES, Where, live

START = """
import sys
from lockstep.cli.main import main
from lockstep.platforms.places import backends
backends.BACKENDS[backends.LOCAL] = "support.places.processes:Processes"
sys.exit(main())
"""


def order(name: str, root: Path) -> Order:
    """Return an order of two nodes, as `lockstep run -f` would give it."""
    text = JOB.format(name=name, nodes=2, steps=1, restarts=0).replace("rank.py", "wait.py")
    profile = asset("clusters/local.yaml")
    cluster = parse_cluster_file(profile.read_text(encoding="utf-8"), str(profile))
    return Order(parse_job_file(text, "job.yaml"), cluster, Typed("job.yaml", ("--cluster", str(root))), detach=True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """Register the place, and end what is left of its jobs."""
    monkeypatch.setitem(backends.BACKENDS, backends.LOCAL, "support.places.processes:Processes")
    root = tmp_path / "place"
    (root / "workspace").mkdir(parents=True)
    (root / "datasets").mkdir()
    for path in JOBS.values():
        (root / "workspace" / path).write_text(SCRIPTS[path])
    found = Processes(root)
    yield found
    for job in found.jobs():
        job.suspend(now=True)
        job.delete()


def seen(job: object) -> ProcessJob:
    assert isinstance(job, ProcessJob)
    job.look_again()
    return job


def test_its_jobs_live_as_they_do_elsewhere(place: Processes, tmp_path: Path) -> None:
    again, elsewhere = tuple(place.words.again.split()), f"; {place.words.elsewhere}"
    live(Where(PROCESSES, again, place.words.where, elsewhere=elsewhere, program=("-c", START)), tmp_path)


def started_and_killed(place: Processes, name: str, at: int) -> int:
    """Return how a start in a fork of this process ended, which is killed at such a call of this number."""
    child = os.fork()
    if child == 0:
        ready, calls = order(name, place.root), 0

        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal calls
            writes = event == "open" and str(place.root) in str(arguments[0]) and arguments[2] & os.O_WRONLY
            if writes or event in ("os.mkdir", "os.rename", "subprocess.Popen"):
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hear)
        try:
            os._exit(place.run(ready))
        finally:
            os._exit(os.EX_SOFTWARE)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_start_that_is_killed_leaves_a_whole_job_or_none(place: Processes) -> None:
    """Killed at each call that changes the file system or starts a process, and then started again."""
    tried = 0
    for number in range(1, 40):
        name = f"k{number}"
        code = started_and_killed(place, name, number)
        tried += code == -signal.SIGKILL
        known = [one.name for one in place.jobs()]
        if name in known:
            found = place.job(name)
            found.resume()
            assert all(one.runs for one in seen(found).seen.jobs.values())
            found.suspend(now=True)
        if code == 0:
            break
    assert tried >= 5 and code == 0
