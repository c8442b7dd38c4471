"""Agents that wait for a job which is over: told from those of a job that starts, runs, was stopped, or whose hosts don't all answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.api.hosts import Host, HostsCluster
from lockstep.plan.hosts.facts import Folder, HostFacts, JobOnHost, Route
from lockstep.plan.hosts.leftovers import LeftAgent, leftovers
from lockstep.plan.hosts.record import Coordinator, JobRecord
from lockstep.platforms.onhost import look

LISTED_MAX = 256

FIRST = JobRecord(
    job={"metadata": {"name": "x", "uid": "u1"}}, cluster="lab", hosts=("lab0", "lab1"), ranks=(1, 1), node=0, workspace="/ws",
        datasets="/d", supervised=False,
    command=("python3",), environment={}, coordinator=Coordinator("10.0.0.1", 29400),
)  # fmt: skip
LATER = replace(FIRST, job={"metadata": {"name": "x", "uid": "u2"}})
LEADS = JobOnHost(record=FIRST, unit="active")
WAITS = JobOnHost(record=replace(FIRST, node=1), unit="active")
END = {"jobUid": "u1", "state": "Complete", "retry": 0}
ENDED = JobOnHost(record=FIRST, unit="inactive", ended=END)
CLUSTER = HostsCluster(hosts=[Host(name="lab0", address="10.0.0.1"), Host(name="lab1")])
NOTHING = JobOnHost()


def host(name: str, jobs: dict[str, JobOnHost]) -> HostFacts:
    folder = Folder("/ws", 1)
    return HostFacts(name, "ada", "/home/ada", 0.0, (3, 11), folder, folder, jobs=jobs, routes={"10.9.9.9": Route("10.1.0.1", "eth1")})


def left(answers: dict[str, HostFacts]) -> list[LeftAgent]:
    return leftovers(answers, CLUSTER, "lab")


def found(first: JobOnHost | None, second: JobOnHost | None) -> list[tuple[str, bool]]:
    """Leftovers by host, and True where their job was deleted. None: the host does not answer."""
    jobs = {"lab0": first, "lab1": second}
    return [(one.host, one.deleted) for one in left({name: host(name, {"x": job}) for name, job in jobs.items() if job is not None})]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (LEADS, WAITS, []),
        (NOTHING, WAITS, [("lab1", True)]),
        (replace(LEADS, record=LATER), WAITS, [("lab1", True)]),
        (NOTHING, replace(WAITS, unit="inactive"), []),
        (None, WAITS, []),
        (JobOnHost(problem="/jobs/x: Permission denied"), WAITS, []),
        (ENDED, WAITS, [("lab1", False)]),
        (ENDED, replace(WAITS, unit="activating"), [("lab1", False)]),
        (replace(ENDED, unit="active"), WAITS, []),
        (replace(ENDED, ended={**END, "jobUid": "u0"}), WAITS, []),
        (ENDED, replace(WAITS, retry=1), []),
        (replace(ENDED, ended={}), WAITS, []),
        (LEADS, NOTHING, []),
        (NOTHING, replace(WAITS, record=replace(FIRST, node=1, cluster="other")), []),
        (NOTHING, replace(WAITS, record=replace(FIRST, node=1, coordinator=Coordinator("10.0.0.9", 29400))), []),
        (NOTHING, replace(WAITS, record=replace(FIRST, node=1, coordinator=Coordinator("10.1.0.1", 29400))), [("lab1", True)]),
    ],
    ids=[
        "runs", "deleted", "deleted and started anew", "deleted and not running", "node 0 away", "node 0 can't be read", "ended",
            "ended, starting",
        "node 0 still ends", "another start's end", "retried since", "lost its agent", "starting", "another file's", "another machine's",
            "by its route",
    ],
)  # fmt: skip
def test_only_an_agent_whose_job_is_over_is_a_leftover(
    first: JobOnHost | None, second: JobOnHost | None, expected: list[tuple[str, bool]]
) -> None:
    assert found(first, second) == expected


def test_a_host_that_may_have_more_jobs_than_it_names_has_not_lost_one() -> None:
    assert LISTED_MAX <= look.JOBS_MAX
    many = {f"x{number}": NOTHING for number in range(LISTED_MAX)}
    assert left({"lab0": host("lab0", many), "lab1": host("lab1", {"x": WAITS})}) == []


def test_a_leftover_says_what_becomes_of_it() -> None:
    (one,) = left({"lab0": host("lab0", {}), "lab1": host("lab1", {"x": WAITS})})
    assert str(one) == "host lab1 did not hear that job x was deleted: its unit and its files there are removed"
    (other,) = left({"lab0": host("lab0", {"x": ENDED}), "lab1": host("lab1", {"x": WAITS})})
    assert str(other) == "host lab1 did not hear that job x ended: its unit there is ended, and its key removed"
