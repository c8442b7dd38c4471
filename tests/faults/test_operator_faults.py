"""The operator is killed at each of its writes, and its writes go wrong: what is left afterwards is always the same.

Here all kills of a scenario come in one run, each write killed on one side of it. `make test-operator-faults` (half an hour) gives each write, and
either side of it, a run of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fault_proxy import Fault
from operator_faults import SCENARIOS, Rig, operator_process, rig_in, tell
from played_job import JOB

WRITES_MAX = 60
ALONE = os.environ.get("LOCKSTEP_FAULTS") == "all"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig_in(tmp_path_factory.mktemp("faults")) as found:
        yield found


def runs(rig: Rig, name: str) -> Iterator[dict[int, Fault]]:
    """The faults of each run, by the number of the write."""
    before, after = Fault(before=rig.operator.start), Fault(after=rig.operator.start)
    if ALONE:
        yield from ({number: fault} for number in range(WRITES_MAX) for fault in (before, after))
    else:
        turn = list(SCENARIOS).index(name)
        yield {number: (before, after)[(number + turn) % 2] for number in range(WRITES_MAX)}


@pytest.mark.timeout(3600 if ALONE else 900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_each_write_it_reaches_the_same_state(rig: Rig, name: str) -> None:
    """Status without times, all objects, and what events told, as a set."""
    reference = tell(rig, SCENARIOS[name], {}, None)
    kills = 0
    for faults in runs(rig, name):
        told = tell(rig, SCENARIOS[name], faults, reference.state).faults
        kills += told
        if told == 0:
            break
    print(f"{name}: {reference.steps} writes, {kills} kills")
    assert kills >= min(reference.steps, 3)


@pytest.mark.parametrize("name", ["create", "resize", "complete"])
def test_writes_that_are_refused_or_whose_replies_are_lost_are_made_good(rig: Rig, name: str) -> None:
    """Every write meets one of the faults, in turn. Events may be missing then, or tell of the refusal: they are not retried."""
    reference = tell(rig, SCENARIOS[name], {}, None, events=False)
    kinds = [
        *(Fault(refuse=code) for code in (409, 422, 429, 500)), Fault(after=lambda: None), Fault(after=rig.proxy.cut_watches),
        Fault(after=rig.proxy.expire_watches),
    ]  # fmt: skip
    turn = list(SCENARIOS).index(name)
    faults = {number: kinds[(number + turn) % len(kinds)] for number in range(WRITES_MAX)}
    assert tell(rig, SCENARIOS[name], faults, reference.state, events=False).faults > 0


def test_a_newer_operator_takes_over_a_running_job_without_touching_its_pods(rig: Rig) -> None:
    """Its agent's image is another, and so is the pod template that it would make."""
    with rig.job() as job:
        SCENARIOS["restart"].prepare(job)
        pods, before = job.uids("Pod"), job.jobs.get("StatefulSet", JOB, "apps/v1") or {}
        rig.operator.kill()
        with operator_process({**rig.settings, "LOCKSTEP_AGENT_IMAGE": "agent:2"}, rig.folder):
            job.until("status says that a newer run waits", lambda: job.jobs.job(JOB)["status"]["run"]["pending"])
            job.fail_and_start_again()
            job.until("the second attempt is in status", job.runs)
            after = job.jobs.get("StatefulSet", JOB, "apps/v1") or {}
        rig.operator.start()
        assert job.uids("Pod") == pods
        assert after["metadata"]["generation"] == before["metadata"]["generation"]


def test_deleting_a_job_needs_no_operator(rig: Rig) -> None:
    with rig.job() as job:
        SCENARIOS["delete"].prepare(job)
        rig.operator.kill()
        job.revive = lambda: None
        SCENARIOS["delete"].act(job)
        job.until("the job is gone", lambda: SCENARIOS["delete"].is_done(job))
    rig.operator.start()
