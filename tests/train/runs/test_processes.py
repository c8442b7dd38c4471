"""A place of one file (`support/places/processes.py`) answers every verb as others do, and keeps its jobs whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.objects import Typed, is_true
from lockstep.assets import asset
from lockstep.platforms.places import backends
from lockstep.platforms.places.backend import Order
from support.checkout import ROOT
from support.clusters.bed_jobs import JOB
from support.places.processes import Processes, ProcessJob, keeper_of
from support.verb_words import JOBS, PROCESSES, STOPPED, UNDISTURBED, Where, differences, script

START = """
import sys
from pathlib import Path
from support.places.processes import Processes
from train.runs.test_processes import order
sys.exit(Processes(Path(sys.argv[1])).run(order(sys.argv[2], Path(sys.argv[1]), detach=sys.argv[3] == "detach")))
"""


def order(name: str, root: Path, *, detach: bool = True) -> Order:
    """Return an order of two nodes, as `lockstep run -f` would give it."""
    text = JOB.format(name=name, nodes=2, steps=1, restarts=2 * (name == "runs")).replace("rank.py", JOBS.get(name, "wait.py"))
    profile = asset("clusters/local.yaml")
    cluster = parse_cluster_file(profile.read_text(encoding="utf-8"), str(profile))
    return Order(parse_job_file(text, "job.yaml"), cluster, Typed("job.yaml", ("--local", "--workspace", str(root))), detach=detach)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """Register the place, and end what is left of its jobs."""
    monkeypatch.setitem(backends.BACKENDS, backends.LOCAL, "support.places.processes.Processes")
    root = tmp_path / "place"
    (root / "workspace").mkdir(parents=True)
    (root / "datasets").mkdir()
    for name, path in JOBS.items():
        (root / "workspace" / path).write_text(script(name))
    found = Processes(root)
    yield found
    for job in found.jobs():
        job.suspend(now=True)
        until(lambda job=job: not seen(job).seen.runs)  # type: ignore[misc]


def seen(job: object) -> ProcessJob:
    assert isinstance(job, ProcessJob)
    job.look_again()
    return job


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def running(place: Processes, name: str = "runs") -> ProcessJob:
    assert place.run(order(name, place.root)) == 0
    return place.job(name)


def test_its_verbs_say_what_they_say_elsewhere(place: Processes, tmp_path: Path) -> None:
    for name in JOBS:
        subprocess.run([sys.executable, "-c", START, str(place.root), name, "detach"], cwd=ROOT / "tests", env=ENVIRONMENT, check=False)
    until(lambda: all(is_true(place.job(name).status, end) for name, end in (("done", "Complete"), ("broke", "Failed"))))
    where = Where(PROCESSES, tuple(place.again.split()), place.where, elsewhere="; --workspace names another one")
    assert differences(where, UNDISTURBED, tmp_path) == []
    assert differences(where, STOPPED, tmp_path) == []


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}/operator:{ROOT}/workspace:{ROOT}/tests"}


def child_of(process: int | None) -> int:
    return int(subprocess.check_output(["pgrep", "-P", str(process)]).split()[0])


def test_a_rank_and_a_node_that_are_killed_come_back(place: Processes) -> None:
    job = running(place)
    os.kill(child_of(child_of(keeper_of(job.folder, 0))), signal.SIGKILL)
    until(lambda: seen(job).status.get("restarts") == 1 and is_true(job.status, "RanksReady"))
    os.kill(child_of(keeper_of(job.folder, 1)), signal.SIGKILL)
    until(lambda: seen(job).status.get("attempts") == 3 and is_true(job.status, "RanksReady"))


def test_a_second_start_of_a_job_that_runs_is_refused_and_one_that_is_stopped_twice_goes_on(place: Processes) -> None:
    job = running(place)
    with pytest.raises(ConfigError, match="job runs runs already"):
        place.run(order("runs", place.root))
    assert job.suspend()
    until(lambda: is_true(seen(job).status, "Suspended"))
    assert not job.suspend()
    assert job.resume()
    until(lambda: is_true(seen(job).status, "RanksReady"))


def test_a_job_goes_on_without_the_command_that_follows_it(place: Processes) -> None:
    words = [sys.executable, "-c", START, str(place.root), "runs", "follow"]
    follower = subprocess.Popen(words, cwd=ROOT / "tests", env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    until(lambda: (place.root / "state/runs/job.json").exists() and is_true(place.job("runs").status, "RanksReady"))
    follower.send_signal(signal.SIGINT)
    follower.wait(30)
    assert is_true(seen(place.job("runs")).status, "RanksReady")


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
