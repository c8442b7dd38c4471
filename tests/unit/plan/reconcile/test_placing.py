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
from lockstep.plan.reconcile.placing import AWAY_SECONDS, Placing, contender, placing
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.times import seconds_of, timestamp
from lockstep.platforms.operator.memory.inventory import Inventory
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, UID, after, asked, condition, event, pod, replicas, running
from unit.plan.reconcile.test_start import NO_ROOM
from unit.plan.reconcile.test_stop import status

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


@pytest.mark.parametrize("change", [no_pods, gated, undecided], ids=["holds none", "in a queue", "nobody has decided"])
def test_a_job_in_nobody_s_way_waits_for_as_long_as_it_takes(change: Any) -> None:
    plan = reconcile(change(holding_since(10**6, queued())), None, CONTEXT, NOW)
    assert replicas(plan) == []
    assert condition(plan, "Failed")[0] == "False"


def test_a_quota_that_has_no_room_for_the_other_pods_is_a_lack_of_room_too() -> None:
    refused = event("uid-StatefulSet-x", "FailedCreate", "exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1")
    observed = replace(holding_since(100, queued()), pods=(pod(0),), warnings=(refused,))
    assert replicas(reconcile(observed, None, CONTEXT, NOW)) == [0]
    assert replicas(reconcile(replace(observed, warnings=()), None, CONTEXT, NOW)) == []


def test_a_stop_that_somebody_asked_for_is_no_release() -> None:
    plan = reconcile(asked(holding_since(100, queued()), suspend=True), None, CONTEXT, NOW)
    assert condition(plan, "Progressing")[1] == "Stopping"
    assert "placement" not in status(plan)
    fewer = holding_since(5, queued())
    fewer = asked(fewer, nodes=1)
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
    namespace: str = "ns"

    @property
    def item(self) -> Object:
        metadata = {
            "name": f"j{self.number}",
            "namespace": self.namespace,
            "uid": f"uid-{self.number}",
            "creationTimestamp": timestamp(NOW + self.created),
        }
        return {"metadata": metadata, "spec": {}, "status": {"placement": self.placement} if self.placement else {}}

    def observed(self, others: list[Job]) -> Observed:
        made = {("StatefulSet", f"j{self.number}"): {"metadata": {"uid": "s"}, "spec": {"replicas": self.replicas}}}
        unplaced = (job for job in others if job is not self and job.placement and "wanted" in job.placement)
        waiting = tuple(contender(job.item, job.pods, PENDING[0]) for job in unplaced)
        return Observed(job=self.item, objects=made, pods=self.pods, waiting=waiting)

    @property
    def pods(self) -> tuple[Object, ...]:
        return PLACED[: self.placed] + PENDING[self.placed : self.wants] if self.replicas or self.leaves else ()


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


@given(st.integers(2, 8), st.integers(2, 10), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=12)
def test_every_job_that_fits_the_cluster_runs_and_ends(nodes: int, count: int, tenants: int, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 (a scheduler, no secret)
    jobs = [
        Job(number, chance.randint(1, nodes), chance.choice([0.0, chance.uniform(0, 300)]), namespace=f"ns-{number % tenants}")
        for number in range(count)
    ]
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


# Jobs of several tenants, as the inventory of the operator knows them.

GPU = {"nvidia.com/gpu": "8"}
CPU = {"cpu": "4"}
NODES = {"gpu-1": GPU | CPU, "gpu-2": GPU | CPU, "cpu-1": CPU}


@dataclass
class Tenants:
    """What the operator has seen."""

    seen: Inventory = field(default_factory=Inventory)
    version: int = 0

    def __post_init__(self) -> None:
        for name, room in NODES.items():
            ready = [{"type": "Ready", "status": "True"}]
            self.see("Node", name, "", status={"allocatable": room, "conditions": ready}, labels={"pool": name[:3]})

    def see(
        self, kind: str, name: str, namespace: str, owner: str = "", labels: Object | None = None, created: str = CREATED, **more: Any
    ) -> None:
        self.version += 1
        metadata = {
            "name": name, "namespace": namespace, "uid": f"{kind}-{namespace}-{name}", "resourceVersion": str(self.version),
            "creationTimestamp": created, "labels": labels or {}, "ownerReferences": [{"uid": owner, "controller": True}],
        }  # fmt: skip
        self.seen.observe(kind, {"kind": kind, "metadata": metadata, **more}, deleted=False)

    def job(
        self, namespace: str, name: str = "train", *, wants: Object = GPU, on: tuple[str | None, ...] = (None, None),
        created: str = CREATED, placement: Object | None = None, priority: int = 0, selector: Object | None = None,
        conditions: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """A job with a pod for each of `on`: its node, or None."""
        labels, uid = {"lockstep.dev/job": name}, f"TrainingJob-{namespace}-{name}"
        status = {"placement": placement, "conditions": [{"type": kind, "status": "True"} for kind in conditions]}
        self.see("TrainingJob", name, namespace, created=created, spec={"nodes": len(on)}, status=status)
        template = {"spec": {"nodeSelector": selector, "containers": [{"name": "t", "resources": {"requests": wants}}]}}
        self.see("StatefulSet", name, namespace, uid, labels, spec={"replicas": len(on), "template": template})
        for number, node in enumerate(on):
            spec = {**template["spec"], "priority": priority, **({"nodeName": node} if node else {})}
            waits = {} if node else {"status": NO_ROOM["status"]}
            self.see("Pod", f"{name}-{number}", namespace, f"StatefulSet-{namespace}-{name}", labels, spec=spec, **waits)

    def of(self, namespace: str, name: str = "train") -> Observed:
        observed = self.seen.observed((namespace, name))
        assert observed is not None
        return observed

    def makes_way(self, namespace: str) -> bool:
        """Return True if the job goes to zero for another one at some moment of the next hour."""
        return any(placing(self.of(namespace), NOW + second).lets_go for second in range(0, 3600, 30))


OLD, LATER = "2026-01-01T00:00:00Z", "2027-01-02T00:00:00Z"


def gathers(seconds: float = 3600.0) -> Object:
    """What is said of a job that holds some of its nodes."""
    return {"placed": 1, "wanted": 2, "since": timestamp(NOW - 5), "releaseTime": timestamp(NOW + seconds)}


def released(seconds: float) -> Object:
    """What is said of a job that has released its nodes, and tries again then."""
    return {"placed": 1, "wanted": 2, "releases": 1, "retryTime": timestamp(NOW + seconds)}


@pytest.fixture
def for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder of the first moment is one for the hour that is looked at."""
    monkeypatch.setattr("lockstep.plan.reconcile.placing.HOLD_ALONE_SECONDS", 7200.0)


@pytest.mark.usefixtures("for_long")
def test_a_job_that_gathers_nodes_which_another_could_use_comes_first_when_it_is_its_namespace_s_turn() -> None:
    world = Tenants()
    world.job("bob", on=("gpu-1", None), created=OLD, placement=gathers())
    world.job("alice")
    turns = [placing(world.of("alice"), NOW + second).lets_go for second in range(0, 3600, 30)]
    assert 0.4 < sum(turns) / len(turns) < 0.6


@pytest.mark.usefixtures("for_long")
@pytest.mark.parametrize("jobs", [1, 50])
def test_a_namespace_has_its_turn_however_many_jobs_another_has(jobs: int) -> None:
    world = Tenants()
    for number in range(jobs):
        world.job("mallory", f"big-{number}", on=("gpu-1", *[None] * 99), created=OLD, placement=gathers())
    world.job("alice", created=LATER)
    turns = [placing(world.of("alice"), NOW + second).lets_go for second in range(0, 3600, 30)]
    assert sum(turns) / len(turns) < 0.6


def test_of_a_namespace_s_jobs_the_first_eight_are_compared_with_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Object] = []

    def counted(pod: Object, other: Object, nodes: Any) -> bool:
        compared.append(other)
        return True

    monkeypatch.setattr("lockstep.plan.reconcile.placing.contend", counted)
    world = Tenants()
    for number in range(50):
        world.job("mallory", f"big-{number}", placement={"placed": 0, "wanted": 2})
    world.job("alice")
    placing(world.of("alice"), NOW)
    assert len(compared) == 8


def test_a_job_that_holds_nothing_is_looked_at_when_the_next_namespace_has_its_turn() -> None:
    world = Tenants()
    world.job("alice")
    assert placing(world.of("alice"), NOW).again_seconds is None
    world.job("bob", on=("gpu-1", None), placement=gathers(60.0))
    placed = placing(world.of("alice"), NOW + 100)  # turns begin at NOW, with alice's
    assert not placed.lets_go
    assert placed.again_seconds is not None
    assert TURN_SECONDS - 100 <= placed.again_seconds <= TURN_SECONDS - 100 + 10


@pytest.mark.usefixtures("for_long")
@pytest.mark.parametrize(
    "other",
    [
        {"wants": CPU, "on": ("cpu-1", None)},
        {"wants": CPU, "on": ("gpu-1", None)},
        {"selector": {"pool": "cpu"}},
        {"conditions": ("Failed",)},
        {"on": (None, None)},
        {"on": ("gpu-1", "gpu-2")},
        {"placement": gathers(-120.0)},
        {"placement": gathers(10**8)},
        {"placement": {**gathers(), "releaseTime": "soon"}},
    ],
    ids=[
        "on CPUs",
        "on CPUs of GPU nodes",
        "other nodes",
        "ended",
        "its status alone says so",
        "has all",
        "long past",
        "for ever",
        "unreadable",
    ],
)
def test_a_job_makes_no_way_for_one_that_gathers_nothing_of_its_nodes(other: dict[str, Any]) -> None:
    world = Tenants()
    world.job("mallory", **({"on": ("gpu-1", None), "created": OLD, "placement": gathers()} | other))
    world.job("alice")
    assert not world.makes_way("alice")


@pytest.mark.usefixtures("for_long")
def test_a_pod_that_waits_for_what_it_never_held_makes_no_job_one_that_gathers_gpus() -> None:
    """Whoever may make pods may give them the name and the label of a job's."""
    world = Tenants()
    world.job("mallory", on=("cpu-1", None), wants=CPU, created=OLD, placement=gathers())
    spec = {"priority": 2_000_000_000, "containers": [{"name": "t", "resources": {"requests": GPU}}]}
    world.see("Pod", "train-1", "mallory", "StatefulSet-mallory-train", {"lockstep.dev/job": "train"}, spec=spec, status=NO_ROOM["status"])
    world.job("alice")
    assert not world.makes_way("alice")


@pytest.mark.usefixtures("for_long")
def test_a_job_of_a_namespace_with_an_operator_of_its_own_or_that_refuses_to_be_listed_does_not_count() -> None:
    world = Tenants()
    world.job("mallory", on=("gpu-1", None), created=OLD, placement=gathers())
    world.job("alice")
    assert world.makes_way("alice")
    world.see("ServiceAccount", "lockstep-operator", "mallory")
    assert not world.makes_way("alice")
    world.seen.own_namespace = "mallory"
    assert world.makes_way("alice")
    world.seen.unserved = {"mallory"}
    assert not world.makes_way("alice")


@pytest.mark.usefixtures("for_long")
@pytest.mark.parametrize(("priority", "makes_way"), [(0, False), (10, True)])
def test_priority_comes_before_age(priority: int, makes_way: bool) -> None:
    world = Tenants()
    world.job("alice", "later", on=("gpu-1", None), created=LATER, placement=gathers(), priority=priority)
    world.job("alice")
    assert world.makes_way("alice") == makes_way


@pytest.mark.usefixtures("for_long")
def test_a_job_of_lower_priority_takes_no_turn_from_one_of_higher() -> None:
    world = Tenants()
    world.job("mallory", on=("gpu-1", None), created=OLD, placement=gathers())
    world.job("alice", priority=10)
    assert not world.makes_way("alice")


@pytest.mark.parametrize(
    ("other", "patience"),
    [
        ({}, 60.0),
        ({"wants": CPU}, 600.0),
        ({"selector": {"pool": "cpu"}}, 600.0),
        ({"conditions": ("Complete",)}, 600.0),
        ({"on": (), "placement": released(30)}, 120.0),
        ({"on": (), "placement": released(30), "wants": CPU}, 600.0),
        ({"on": (), "placement": released(30), "selector": {"pool": "cpu"}}, 600.0),
        ({"on": (), "placement": released(10**6)}, 600.0),
        ({"on": (), "placement": released(-(10**4))}, 600.0),
        ({"on": (), "placement": gathers()}, 600.0),
    ],
    ids=[
        "on the same nodes",
        "on CPUs",
        "on other nodes",
        "ended",
        "is away",
        "away from CPUs",
        "away from other nodes",
        "away for ever",
        "away long ago",
        "has no pods",
    ],
)
def test_a_job_s_patience_is_that_of_one_alone_unless_another_waits_for_the_same_nodes(other: dict[str, Any], patience: float) -> None:
    world = Tenants()
    world.job("bob", **({"placement": {"placed": 0, "wanted": 2}} | other))
    world.job("alice", on=("gpu-1", None))
    status = placing(world.of("alice"), NOW).status
    assert status is not None
    assert patience <= seconds_of(str(status.release_time)) - NOW <= 1.25 * patience


def test_what_others_have_to_know_of_a_job_follows_its_pods() -> None:
    world = Tenants()
    world.job("bob", on=("gpu-1", None), placement=gathers())
    world.job("alice")
    assert [other["holds"] for other in world.of("alice").waiting or ()] == [True]
    world.job("bob", on=(None, None), placement=gathers())
    assert [other["holds"] for other in world.of("alice").waiting or ()] == [False]


def test_a_status_without_a_stateful_set_takes_no_patience_from_others() -> None:
    """Whoever may write statuses may write one for a job that the operator has not made yet."""
    world = Tenants()
    world.see("TrainingJob", "ghost", "mallory", spec={"nodes": 2}, status={"placement": released(30)})
    world.job("alice", on=("gpu-1", None))
    status = placing(world.of("alice"), NOW).status
    assert status is not None and seconds_of(str(status.release_time)) - NOW >= 600


def test_what_others_have_to_know_of_a_job_without_pods_follows_its_stateful_set() -> None:
    world = Tenants()
    world.job("bob", on=(), placement=released(30))
    world.job("alice", on=("gpu-1", None))
    assert [other["pod"]["spec"]["nodeSelector"] for other in world.of("alice").waiting or ()] == [None]
    world.job("bob", on=(), placement=released(30), selector={"pool": "cpu"})
    assert [other["pod"]["spec"]["nodeSelector"] for other in world.of("alice").waiting or ()] == [{"pool": "cpu"}]
