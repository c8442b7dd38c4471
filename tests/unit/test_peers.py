"""What peers.py makes of its measurements: counts, statistics and verdicts, without a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.peers_figures import count_writes, goals, percentiles, spread, tables, writes_per_job

OPERATOR = "system:serviceaccount:lockstep:lockstep-operator"
CONTROLLER = "system:serviceaccount:kube-system:statefulset-controller"


def line(
    user: str, verb: str, resource: str, namespace: str = "ns", code: int = 200, stage: str = "ResponseComplete", subresource: str = ""
) -> str:
    target = {"resource": resource, "namespace": namespace} | ({"subresource": subresource} if subresource else {})
    return json.dumps({"stage": stage, "verb": verb, "user": {"username": user}, "objectRef": target, "responseStatus": {"code": code}})


def test_writes_are_counted_by_author_verb_and_resource() -> None:
    lines = [
        line(OPERATOR, "create", "statefulsets", code=201),
        line(OPERATOR, "patch", "trainingjobs", subresource="status"),
        line(CONTROLLER, "create", "pods"),
        line(CONTROLLER, "create", "pods"),
    ]
    assert count_writes(lines, "ns", {OPERATOR}) == {
        "own create statefulsets": 1, "own patch trainingjobs/status": 1, "kube-controller-manager create pods": 2,
    }  # fmt: skip


def test_a_refused_write_is_counted_with_its_code() -> None:
    assert count_writes([line(OPERATOR, "create", "services", code=409)], "ns", {OPERATOR}) == {"own create services (409)": 1}


@pytest.mark.parametrize(
    "other",
    [
        line(OPERATOR, "get", "pods"),
        line(OPERATOR, "list", "pods"),
        line(OPERATOR, "watch", "pods"),
        line(OPERATOR, "update", "leases"),
        line(OPERATOR, "create", "pods", namespace="another"),
        line(OPERATOR, "create", "pods", stage="ResponseStarted"),
        json.dumps({"stage": "ResponseComplete", "verb": "create", "user": {"username": OPERATOR}}),
    ],
)
def test_reads_leases_other_namespaces_and_unfinished_requests_are_no_writes_of_a_job(other: str) -> None:
    assert not count_writes([other], "ns", {OPERATOR})


def test_writes_of_a_job_are_the_mean_of_all_jobs_and_tell_own_from_others() -> None:
    counts = {"own create pods": 4, "own patch jobs/status": 2, "kube-controller-manager create pods": 3}
    assert writes_per_job(counts, 2) == {
        "total": 4.5, "own": 3.0, "kube-controller-manager": 1.5,
        "kinds": {"own create pods": 2, "own patch jobs/status": 1, "kube-controller-manager create pods": 1.5},
    }  # fmt: skip


def test_percentiles_are_in_milliseconds_and_the_high_ones_of_few_runs_are_the_maximum() -> None:
    assert percentiles([0.3, 0.1, 0.2]) == {"p50": 200, "p95": 300, "p99": 300, "n": 3}
    assert percentiles([number / 1000 for number in range(100)]) == {"p50": 49.5, "p95": 95, "p99": 99, "n": 100}


def test_a_spread_has_the_median_and_both_ends() -> None:
    assert spread([3, 1, 2.5, 2]) == {"median": 2.25, "min": 1, "max": 3, "n": 4}


def size(all_pods: float, own_cpu: float, writes: float) -> dict[str, Any]:
    latency = {"p50": all_pods, "p95": 2 * all_pods, "p99": 3 * all_pods, "n": 5}
    counted = {"total": writes, "own": 4.0, "kube-controller-manager": writes - 4, "kinds": {"own create pods": 2}}
    return {"first_pod_ms": latency, "all_pods_ms": latency, "cpu_ms": {"own": own_cpu, "api_server": 9.0}, "writes": counted}


def result(lockstep: float = 10, own_cpu: float = 15) -> dict[str, Any]:
    """JobSet has 10 for everything."""
    sizes = {nodes: {"Lockstep": size(lockstep, own_cpu, 9), "JobSet": size(10, 10, 9)} for nodes in ("2", "16", "64")}
    figures = {"seconds": 2.0, "cpu_ms": {"own": 1.0, "api_server": 1.0}}
    burst = {
        system: {"0": {"memory_mb": 1}, "200": figures | {"jobs_per_second": rate, "memory_mb": 5}, "1000": figures | {"jobs_per_second": rate, "memory_mb": 10}}
        for system, rate in (("Lockstep", 30), ("JobSet", 60))
    }  # fmt: skip
    return {"sizes": sizes, "burst": burst}


def verdicts(measured: dict[str, Any]) -> dict[str, bool | None]:
    return {goal.name: goal.met for goal in goals(measured)}


def test_a_goal_is_met_up_to_its_bound() -> None:
    unmeasured = {"create → both processes run", "exit 1 → all run again, default backoff"}
    assert {name for name, met in verdicts(result()).items() if met is None} == unmeasured
    assert all(met for met in verdicts(result()).values() if met is not None)


def test_a_goal_is_not_met_beyond_its_bound() -> None:
    missed = {name for name, met in verdicts(result(lockstep=10.1, own_cpu=15.1)).items() if met is False}
    assert missed == {*(f"apply → all pods at {nodes} nodes, p50" for nodes in (2, 16, 64)), "own CPU per job at 64 nodes"}


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert set(verdicts({}).values()) == {None}
    assert tables({}) == ""


def test_a_verdict_names_the_figure_the_peer_s_and_their_ratio() -> None:
    [goal] = [goal for goal in goals(result(own_cpu=20)) if "CPU" in goal.name]
    assert str(goal) == "NOT MET       own CPU per job at 64 nodes: 20 ms, 2.00 × JobSet's (goal: ≤ 1.5 × JobSet's 10 ms)"


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    for table in tables(result()).split("\n\n"):
        head, _, *rows = table.splitlines()
        assert rows and {row.count("|") for row in rows} == {head.count("|")}
