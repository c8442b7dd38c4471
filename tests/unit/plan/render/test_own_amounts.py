"""CPU and memory that a job states for itself: in pods within the cluster's limits, on hosts in the unit, elsewhere a warning."""

from __future__ import annotations

from typing import Any

import pytest

from golden.plan_cases import CONTEXT, job, profile, trainer_of
from lockstep.plan.ahead.forecast import capacity
from lockstep.plan.hosts.place import Seat, unlimited_lines
from lockstep.plan.hosts.planned import HostsAsked, cards_of
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve, unkept_lines
from lockstep.plan.render.resolved import Refused
from lockstep.plan.render.run import expected_by_preflight
from support.hosts_told import JOB, facts, placed

CLUSTERS = {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"cpu": "8", "memory": "16Gi"}}
OWN_JOB = JOB.replace("nodes: 2", "nodes: 2, resources: {cpu: 1500m, memory: 4Gi}")
BOTH = frozenset({"cpu", "memory", "pids"})


def resources_of(own: dict[str, str], clusters: dict[str, Any]) -> Any:
    return trainer_of(render(resolve(job(resources=own), profile(resources=clusters)), CONTEXT))["resources"]


@pytest.mark.parametrize(
    ("own", "clusters", "expected"),
    [
        ({}, CLUSTERS, CLUSTERS),
        ({"cpu": "4"}, CLUSTERS, {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"cpu": "4", "memory": "16Gi"}}),
        ({"cpu": "1", "memory": "4Gi"}, CLUSTERS, {key: {"cpu": "1", "memory": "4Gi"} for key in ("requests", "limits")}),
        ({"memory": "17179869184"}, CLUSTERS, {"requests": {"cpu": "2", "memory": "17179869184"}, "limits": {"cpu": "8",
            "memory": "17179869184"}}),
        ({"cpu": "64"}, {}, {"requests": {"cpu": "64"}, "limits": {"cpu": "64"}}),
        ({"cpu": "64"}, {"limits": {"cpu": "0"}}, {"requests": {"cpu": "64"}, "limits": {"cpu": "64"}}),
    ],
    ids=["none", "one of two", "less than the cluster's requests", "as much as its limit", "no limits", "a limit of 0 is none"],
)  # fmt: skip
def test_a_pod_requests_what_its_job_states_and_is_limited_to_it(
    own: dict[str, str], clusters: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert resources_of(own, clusters) == expected


def test_more_than_the_clusters_limit_is_refused_with_both_numbers_and_where_the_limit_is_set() -> None:
    with pytest.raises(Refused) as refused:
        resources_of({"cpu": "8001m", "memory": "17Gi"}, CLUSTERS)
    assert [one.reason for one in refused.value.refusals] == ["ResourcesNotPossible"] * 2
    assert str(refused.value).startswith(
        "spec.resources.cpu is 8001m, and the cluster p allows a pod 8 (resources.limits.cpu in its file): ask for less, or have that limit"
        " raised; spec.resources.memory is 17Gi, and the cluster p allows a pod 16Gi (resources.limits.memory in its file)"
    )


@pytest.mark.parametrize("nothing", ["0", "0m", "0Gi"])
def test_nothing_is_refused_because_the_kubelet_takes_it_for_no_limit(nothing: str) -> None:
    with pytest.raises(Refused, match=rf"spec.resources.memory is {nothing}: state more than 0, or leave it out") as refused:
        resources_of({"memory": nothing}, CLUSTERS)
    assert [one.reason for one in refused.value.refusals] == ["ResourcesNotPossible"]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"memory": "64"}, "spec.resources.memory is 64, which is 64 bytes: is 64Gi meant? State 64Mi or more"),
        ({"memory": "128m"}, "spec.resources.memory is 128m, which is 0.128 bytes: is 128Gi meant? State 64Mi or more"),
        ({"cpu": "4m"}, "spec.resources.cpu is 4m, which is 0.004 cores: is 4 meant? State 10m or more"),
    ],
)
def test_an_amount_with_a_wrong_suffix_is_refused_because_no_rank_would_start(own: dict[str, str], words: str) -> None:
    with pytest.raises(Refused) as refused:
        resources_of(own, {})
    assert str(refused.value) == words


def test_a_rank_on_a_cpu_is_planned_with_its_part_of_the_jobs_own_memory() -> None:
    resolved = resolve(job(resources={"memory": "4Gi"}, gpusPerNode=0, ranksPerNode=2), profile(resources=CLUSTERS))
    assert capacity(resolved, ()) == (2 << 30, "spec.resources.memory / 2 ranks")


@pytest.mark.parametrize(("own", "expected"), [({}, 32 << 30), ({"memory": "4Gi"}, 4 << 30), ({"memory": "64Gi"}, 32 << 30)])
def test_preflight_expects_no_more_shared_memory_than_the_job_has_memory(own: dict[str, str], expected: int) -> None:
    checks = expected_by_preflight(resolve(job(resources=own), profile(shmSize="32Gi")))
    assert checks is not None and checks.shm_bytes == expected


def test_systemd_limits_the_ranks_of_a_host() -> None:
    for seat in placed(facts("lab0", "10.0.0.1", controllers=BOTH), facts("lab1", "10.0.0.2", controllers=BOTH), job=OWN_JOB):
        assert "\nCPUQuota=150%\nMemoryMax=4294967296\n\n[Install]" in seat.record.unit and not seat.unlimited


def test_a_job_that_states_nothing_is_not_limited_on_a_host() -> None:
    seat, _ = placed(facts("lab0", "10.0.0.1"), facts("lab1", "10.0.0.2"))
    assert "CPUQuota" not in seat.record.unit and "MemoryMax" not in seat.record.unit and not unlimited_lines([seat])


def seats_with(first: dict[str, Any], second: dict[str, Any], own: str = OWN_JOB) -> list[Seat]:
    return placed(facts("lab0", "10.0.0.1", **first), facts("lab1", "10.0.0.2", **second), job=own)


def test_hosts_that_can_not_keep_it_are_named_with_what_would_change_that() -> None:
    stated, cpu = (f"warning: ResourcesNotKept: spec.resources ({what}) is not kept on" for what in ("cpu 1500m, memory 4Gi", "cpu 1500m"))
    delegate = "there: as root, set Delegate=cpu memory in user@.service, under control groups of version 2"
    assert unlimited_lines(seats_with({}, {})) == [
        f"{stated} hosts lab0, lab1: units of ada have no control over cpu and memory {delegate}"
    ]
    assert unlimited_lines(seats_with({"controllers": BOTH}, {"controllers": frozenset({"memory"})})) == [
        f"{cpu} host lab1: units of ada have no control over cpu {delegate}"
    ]
    assert unlimited_lines(seats_with({"controllers": BOTH}, {"controllers": BOTH, "has_units": False})) == [
        f"{stated} host lab1: there is no systemd for the units of ada: as root on it: install dbus-user-session and libpam-systemd, then"
        " loginctl enable-linger ada"
    ]
    assert not unlimited_lines(seats_with({"has_units": False}, {}, JOB))


@pytest.mark.parametrize(("controllers", "planned"), [(BOTH, 4 << 30), ({"memory"}, 4 << 30), ({"cpu"}, 64 << 30)])
def test_a_host_is_planned_with_the_jobs_memory_where_its_units_keep_that_whatever_else_they_keep(
    controllers: set[str], planned: int
) -> None:
    told = {"controllers": frozenset(controllers), "memory": 64 << 30}
    placed_there = seats_with(told, told)
    hosts = {seat.host.name: facts(seat.host.name, "10.0.0.1", **told) for seat in placed_there}
    assert [card.bytes for card in cards_of(HostsAsked(hosts, (), tuple(placed_there)))] == [planned] * 2


def test_where_ranks_are_started_by_hand_one_line_says_that_nothing_keeps_it() -> None:
    assert unkept_lines(resolve(job(resources={"cpu": "4"}), profile()), "here", "ranks take what this machine has") == [
        "warning: ResourcesNotKept: spec.resources (cpu 4) is not kept here: ranks take what this machine has"
    ]
    assert not unkept_lines(resolve(job(), profile()), "here", "ranks take what this machine has")
