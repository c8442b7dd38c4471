"""Gangs that can't be placed as a whole let go of what they hold and try again: decisions by table, and many jobs on few nodes. No
cluster.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.api.objects import Object
from lockstep.plan.observed import Observed
from lockstep.plan.pages.why import answer_page, why
from lockstep.plan.reconcile.events import events_between
from lockstep.plan.reconcile.placing import AWAY_SECONDS, Placing, placing
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.times import seconds_of, timestamp
from lockstep.platforms.operator.memory.inventory import Inventory
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, UID, after, condition, pod, running
from unit.plan.reconcile.test_start import NO_ROOM
from unit.plan.reconcile.test_stop import replicas, status

HOLD_ALONE_SECONDS = 600.0
HOLD_SECONDS = 60.0
TURN_SECONDS = 180.0

CREATED = "2027-01-01T00:00:00Z"
JITTER = HOLD_SECONDS / 4


def half_placed(*others: Object, **placement: Any) -> Observed:
    """One of two pods has a node; `placement` is what status says of it."""
    observed = replace(running(), pods=(pod(0), {**pod(1), **NO_ROOM}), waiting=others)
    metadata = {**observed.job["metadata"], "creationTimestamp": CREATED}
    return replace(observed, job={**observed.job, "metadata": metadata, "status": {**observed.status, "placement": placement}})


def holding_since(seconds: float, *others: Object, **placement: Any) -> Observed:
    return half_placed(*others, **{"placed": 1, "wanted": 2, "since": timestamp(NOW - seconds)} | placement)


def placed_status(observed: Observed) -> Object | None:
    """status.placement, as it is stored."""
    status = placing(observed, NOW).status
    return None if status is None else status.to_dict()


def other(created: str = "2027-01-02T00:00:00Z", uid: str = "u", **placement: Any) -> Object:
    said = {"placed": 1, "wanted": 2, "since": timestamp(NOW), **placement}
    return {
        "metadata": {"name": "y", "namespace": "ns", "uid": uid, "creationTimestamp": created},
        "spec": {},
        "status": {"placement": said},
    }


def holder(created: str = "2027-01-02T00:00:00Z", uid: str = "u") -> Object:
    return other(created, uid, releaseTime=timestamp(NOW + 5))


def away(uid: str = "u") -> Object:
    return other(uid=uid, releases=1, retryTime=timestamp(NOW + 5))


def queued(uid: str = "u") -> Object:
    return other(uid=uid, placed=0)


def hold_seconds(*others: Object) -> float:
    said = placed_status(half_placed(*others))
    return seconds_of(said["releaseTime"]) - NOW


@pytest.mark.parametrize(
    ("others", "least"),
    [
        ((), HOLD_ALONE_SECONDS),
        ((queued(),), HOLD_SECONDS),
        ((holder(created="2026-01-01T00:00:00Z"),), HOLD_SECONDS),
        ((holder(CREATED, uid="0"),), HOLD_SECONDS),
        ((holder(CREATED, uid="z"),), 2 * HOLD_SECONDS),
        ((holder(),), 2 * HOLD_SECONDS),
        ((away(),), 2 * HOLD_SECONDS),
        ((holder(), away("v"), queued("w")), 2 * HOLD_SECONDS),
        ((holder(), holder(created="2026-01-01T00:00:00Z", uid="v")), HOLD_SECONDS),
    ],
    ids=["nobody else waits", "one waits", "an earlier one holds", "as old", "as old, larger uid", "a later one holds",
        "a later one is away", "some", "both"],
)  # fmt: skip
def test_the_earliest_job_holds_longest_and_nobody_for_ever(others: tuple[Object, ...], least: float) -> None:
    assert least <= hold_seconds(*others) <= least + JITTER


def test_two_jobs_do_not_move_in_step() -> None:
    jobs = [half_placed(queued()), half_placed(queued())]
    jobs[1].job["metadata"]["uid"] = UID.replace("1", "2")
    assert placing(jobs[0], NOW).status != placing(jobs[1], NOW).status


def test_a_job_that_lacks_a_node_for_a_moment_keeps_the_others() -> None:
    plan = reconcile(holding_since(HOLD_SECONDS - 30, queued()), None, CONTEXT, NOW)
    assert (replicas(plan), plan.again_seconds) == ([], 10.0)
    assert "holds 1 of 2 nodes; releases them at 2027-01-15T08:00:" in condition(plan, "PodsScheduled")[2]


def test_a_job_that_gets_a_node_has_the_whole_time_again() -> None:
    observed = replace(holding_since(1000, queued()), job={**half_placed().job, "status": {"placement": {"placed": 0, "since": CREATED}}})
    assert not placing(observed, NOW).lets_go
    assert placing(holding_since(1000, queued()), NOW).lets_go


def test_a_job_lets_go_and_tries_again_and_every_step_is_told() -> None:
    observed = holding_since(100, queued())
    plan = reconcile(observed, None, CONTEXT, NOW)
    assert replicas(plan) == [0]
    said = status(plan)["placement"]
    assert (said["placed"], said["wanted"], said["releases"]) == (1, 2, 1)
    assert condition(plan, "Progressing")[:2] == ("False", "NodesReleased")
    assert condition(plan, "Failed")[0] == "False"
    told = [note for note in events_between(observed.status, status(plan)) if note.reason == "NodesReleased"]
    assert [(n.type, n.message.split(":")[0]) for n in told] == [
        ("Normal", "held 1 of 2 nodes for 100 s while the rest found none, and releases them so that another job can run")
    ]

    going = after(observed, plan)
    ends = reconcile(going, None, CONTEXT, NOW + 5)
    assert (replicas(ends), ends.create) == ([], ())
    gone = replace(after(going, ends), pods=())
    rests = reconcile(gone, None, CONTEXT, NOW + 10)
    assert replicas(rests) == []
    again = rests.again_seconds or 0.0
    assert AWAY_SECONDS[0] - 10 - 1 <= again <= 1.5 * AWAY_SECONDS[0] - 10
    message = f"released 1 of 2 nodes so that another job can run; tries again at {said['retryTime']}"
    assert condition(rests, "Progressing") == condition(rests, "PodsScheduled") == ("False", "NodesReleased", message)
    assert condition(rests, "Accepted")[0] == "True"
    assert "NodesReleased" not in {note.reason for note in rests.events}

    starts = reconcile(after(gone, rests), None, CONTEXT, NOW + 10 + again + 0.1)
    assert replicas(starts) == [2]
    assert status(starts)["placement"] == {"releases": 1}
    comes = replace(after(gone, starts), pods=observed.pods)
    twice = reconcile(comes, None, CONTEXT, NOW + 60)
    assert status(twice)["placement"]["releases"] == 1
    runs = replace(after(comes, twice), pods=running().pods)
    assert "placement" not in status(reconcile(runs, None, CONTEXT, NOW + 70))


def test_each_release_keeps_a_job_away_for_longer_up_to_a_limit() -> None:
    waits = []
    for releases in range(12):
        said = placed_status(holding_since(10**4, queued(), releases=releases))
        waits.append(seconds_of(said["retryTime"]) - NOW)
    first, most = AWAY_SECONDS
    for number, wait in enumerate(waits):
        least = min(first * 2**number, most)
        assert least - 1 <= wait <= 1.5 * least


def test_a_job_that_let_go_leaves_earlier_holders_their_turn_but_not_for_ever() -> None:
    gone = replace(after_release(), waiting=(holder(created="2026-01-01T00:00:00Z"),))
    late = gone.job["status"]["placement"]["retryTime"]
    waits = placing(gone, seconds_of(late) + 1)
    assert waits.is_away
    assert "once an earlier job has its nodes" in waits.message
    assert not placing(gone, seconds_of(late) + TURN_SECONDS + 1).is_away
    assert not placing(replace(gone, waiting=(holder(),)), seconds_of(late) + 1).is_away


def after_release() -> Observed:
    observed = holding_since(100, queued())
    plan = reconcile(observed, None, CONTEXT, NOW)
    return replace(after(observed, plan), pods=())


def test_times_of_a_clock_that_was_ahead_hold_nobody() -> None:
    gone = after_release()
    said = {**gone.job["status"]["placement"], "retryTime": timestamp(NOW + 86400)}
    ahead = replace(gone, job={**gone.job, "status": {**gone.status, "placement": said}})
    assert not placing(ahead, NOW).is_away
    held = placed_status(holding_since(-86400, queued()))
    assert held["since"] == timestamp(NOW)


def test_an_operator_that_ended_between_the_scale_and_the_status_did_let_go() -> None:
    observed = holding_since(100, queued(), releaseTime=timestamp(NOW - 1))
    plan = reconcile(observed, None, CONTEXT, NOW)
    lost = replace(after(observed, replace(plan, status=None)), pods=())
    plan = reconcile(lost, None, CONTEXT, NOW + 1)
    assert replicas(plan) == []
    assert status(plan)["placement"]["releases"] == 1


def no_pods(observed: Observed) -> Observed:
    return replace(observed, pods=tuple({**pod(n), **NO_ROOM} for n in range(2)))


def gated(observed: Observed) -> Observed:
    spec = {"containers": [], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    return replace(observed, pods=tuple({**pod(n), **NO_ROOM, "spec": spec} for n in range(2)))


def undecided(observed: Observed) -> Observed:
    return replace(observed, pods=(pod(0), {**pod(1), **NO_ROOM, "status": {"phase": "Pending"}}))


def test_a_job_that_holds_none_makes_room_for_an_earlier_one_that_holds_some() -> None:
    observed = no_pods(holding_since(5, holder(created="2026-01-01T00:00:00Z"), placed=0))
    plan = reconcile(observed, None, CONTEXT, NOW)
    assert replicas(plan) == [0]
    assert status(plan)["placement"]["releases"] == 0
    assert replicas(reconcile(no_pods(holding_since(5, holder(), placed=0)), None, CONTEXT, NOW)) == []


def suspended(observed: Observed) -> Observed:
    return replace(observed, job={**observed.job, "spec": {**observed.job["spec"], "suspend": True}})


@pytest.mark.parametrize("change", [no_pods, gated, undecided], ids=["holds none", "in a queue", "nobody has decided"])
def test_a_job_in_nobody_s_way_waits_for_as_long_as_it_takes(change: Any) -> None:
    plan = reconcile(change(holding_since(10**6, queued())), None, CONTEXT, NOW)
    assert replicas(plan) == []
    assert condition(plan, "Failed")[0] == "False"


def test_a_quota_that_has_no_room_for_the_other_pods_is_a_lack_of_room_too() -> None:
    event = {"involvedObject": {"uid": "uid-StatefulSet-x"}, "reason": "FailedCreate",
        "message": "exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1"}  # fmt: skip
    observed = replace(holding_since(100, queued()), pods=(pod(0),), warnings=(event,))
    assert replicas(reconcile(observed, None, CONTEXT, NOW)) == [0]
    assert replicas(reconcile(replace(observed, warnings=()), None, CONTEXT, NOW)) == []


def test_a_stop_that_somebody_asked_for_is_no_release() -> None:
    plan = reconcile(suspended(holding_since(100, queued())), None, CONTEXT, NOW)
    assert condition(plan, "Progressing")[1] == "Stopping"
    assert "placement" not in status(plan)
    fewer = holding_since(5, queued())
    fewer = replace(fewer, job={**fewer.job, "spec": {**fewer.job["spec"], "nodes": 1}})
    plan = reconcile(fewer, None, CONTEXT, NOW)
    assert condition(plan, "Progressing")[1] == "Resizing"
    assert "placement" not in status(plan)


@pytest.mark.parametrize(("kind", "created", "released"), [("Interactive", 0, True), ("Interactive", 90, False), ("Batch", 90, True)])
def test_a_dev_environment_that_has_lost_a_node_keeps_the_others(kind: str, created: int, released: bool) -> None:
    """Whoever works there waits for the node. One that never had all of its nodes is in others' way like any job."""
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(NOW + 1)}
    observed = holding_since(10**4, queued())
    first, second = (
        {**item, "metadata": {**item["metadata"], "creationTimestamp": timestamp(NOW + at)}}
        for item, at in ((pod(0, status={"phase": "Running", "conditions": [placed]}), 0), (observed.pods[1], created))
    )
    body = {**observed.job, "spec": {**observed.job["spec"], "type": kind}}
    assert placing(replace(observed, pods=(first, second), job=body), NOW + 10**4).lets_go == released


def test_a_job_that_waits_for_nodes_is_told_of_the_others_that_do() -> None:
    inventory, key = Inventory(), ("ns", "x")

    def others(job: str = "x") -> list[str]:
        observed = inventory.observed(("ns", job))
        return [str(other["metadata"]["uid"]) for other in observed.waiting or ()]

    def saw(name: str, version: int, placement: Object | None, deleted: bool = False) -> None:
        metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "creationTimestamp": CREATED, "resourceVersion": str(version)}
        inventory.observe("TrainingJob", {"metadata": metadata, "spec": {}, "status": {"placement": placement}}, deleted=deleted)

    said = {"placed": 1, "wanted": 2}
    saw("x", 1, said)
    saw("y", 2, {"releases": 1})
    assert others() == []
    saw("y", 3, said)
    saw("z", 4, said)
    assert (others(), others("y")) == (["uid-y", "uid-z"], ["uid-x", "uid-z"])
    saw("y", 5, None)
    saw("z", 6, said, deleted=True)
    assert others() == []
    saw("z", 7, said)
    inventory.drop_others("TrainingJob", {key, ("ns", "y")}, 8)
    assert others() == []
    saw("z", 9, said)
    saw("x", 10, None)
    assert others() == [], "a job that has its nodes needs to know of nobody"


def test_why_counts_the_seconds() -> None:
    observed = holding_since(0, queued())
    seen = after(observed, reconcile(observed, None, CONTEXT, NOW))
    left = round(hold_seconds(queued())) - 20
    assert f"holds 1 of 2 nodes; releases them in {left} s so that another job can run" in answer_page(why(seen, (), NOW + 20))
    gone = after_release()
    gone = after(gone, reconcile(gone, None, CONTEXT, NOW + 1))
    assert answer_page(why(gone, (), NOW + 2)).startswith("x: Waiting: released 1 of 2 nodes so that another job can run; tries again at")


# Many jobs on few nodes. The scheduler gives free nodes to pending pods in any order, which is the worst that one may do.

STEP_SECONDS = 5.0
RUNS_SECONDS = 600.0
PLACED = tuple(pod(n) for n in range(16))
PENDING = tuple({**pod(n), **NO_ROOM} for n in range(16))


@dataclass
class Job:
    """One job of the simulation, as the API server has it."""

    number: int
    wants: int
    created: float
    replicas: int = 0
    placed: int = 0
    placement: Object | None = None
    ends: float | None = None
    """When it has run, once all its pods have a node."""
    leaves: float | None = None
    """When its pods are gone."""
    releases: int = 0

    @property
    def item(self) -> Object:
        metadata = {
            "name": f"j{self.number}",
            "namespace": "ns",
            "uid": f"uid-{self.number}",
            "creationTimestamp": timestamp(NOW + self.created),
        }
        return {"metadata": metadata, "spec": {}, "status": {"placement": self.placement} if self.placement else {}}

    def observed(self, others: list[Job]) -> Observed:
        pods = PLACED[: self.placed] + PENDING[self.placed : self.wants] if self.replicas or self.leaves else ()
        made = {("StatefulSet", f"j{self.number}"): {"metadata": {"uid": "s"}, "spec": {"replicas": self.replicas}}}
        waiting = tuple(job.item for job in others if job is not self and job.placement and "wanted" in job.placement)
        return Observed(job=self.item, objects=made, pods=pods, waiting=waiting)


@dataclass
class Simulation:
    """Jobs, free nodes, and a scheduler."""

    jobs: list[Job]
    free: int
    chance: random.Random
    now: float = 0.0
    done: list[Job] = field(default_factory=list)

    def step(self) -> None:
        self.now += STEP_SECONDS
        here = [job for job in self.jobs if job.created <= self.now]
        for job in here:
            self._end(job)
            if job.ends is None:
                self._act(job, placing(job.observed(here), NOW + self.now))
        pending = [job for job in here if job in self.jobs and job.leaves is None for _ in range(job.replicas - job.placed)]
        for job in self.chance.sample(pending, min(self.free, len(pending))):
            job.placed, self.free = job.placed + 1, self.free - 1

    def _end(self, job: Job) -> None:
        if job.ends is None and job.replicas and job.placed == job.wants:
            job.ends, job.placement = self.now + RUNS_SECONDS, None
        gone = job.leaves is not None and self.now >= job.leaves
        ended = job.ends is not None and self.now >= job.ends
        if gone or ended:
            self.free, job.placed, job.leaves = self.free + job.placed, 0, None
        if ended:
            self.jobs.remove(job)
            self.done.append(job)

    def _act(self, job: Job, decision: Placing) -> None:
        job.placement = None if decision.status is None else decision.status.to_dict()
        if decision.lets_go and job.replicas:
            job.replicas, job.leaves, job.releases = 0, self.now + self.chance.uniform(1, 30), job.releases + 1
        if not (decision.lets_go or decision.is_away or job.replicas or job.leaves):
            job.replicas = job.wants


@given(st.integers(2, 8), st.integers(2, 10), st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_every_job_that_fits_the_cluster_runs_and_ends(nodes: int, count: int, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 (a scheduler, no secret)
    jobs = [Job(number, chance.randint(1, nodes), chance.choice([0.0, chance.uniform(0, 300)])) for number in range(count)]
    play = Simulation(list(jobs), nodes, chance)
    idle_since, longest_idle = 0.0, 0.0
    while play.jobs:
        play.step()
        if any(job.ends for job in play.jobs):
            idle_since = play.now
        longest_idle = max(longest_idle, play.now - idle_since)
        assert longest_idle < 1200, [(job.wants, job.placed, job.placement) for job in play.jobs]
    assert len(play.done) == count


def test_two_jobs_that_hold_half_each_both_end_and_one_lets_go_once() -> None:
    first, second = Job(0, 2, 0.0, replicas=2, placed=1), Job(1, 2, 1.0, replicas=2, placed=1)
    play = Simulation([first, second], 0, random.Random(1))  # noqa: S311
    while play.jobs:
        play.step()
        assert play.now < 3600
    assert play.done == [first, second]
    assert (first.releases, second.releases) == (0, 1)
