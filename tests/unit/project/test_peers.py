"""What peers.py makes of its measurements: counts, statistics and verdicts, without a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.peers.figures import (
    Life,
    Outcome,
    conditions,
    count_writes,
    goals,
    life,
    outcome,
    percentiles,
    running,
    spread,
    tables,
    writes_per_job,
)

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
        system: {"0": {"memory_mb": 1}, "200": figures | {"jobs_per_second": rate, "memory_mb": 5},
            "1000": figures | {"jobs_per_second": rate, "memory_mb": 10}}
        for system, rate in (("Lockstep", 30), ("JobSet", 60))
    }  # fmt: skip
    return {"sizes": sizes, "burst": burst, "faults": faults()}


def faults(again: float = 1.0) -> dict[str, Any]:
    """Lockstep starts all ranks again; of JobSet's, the one that had the fault comes back by itself."""
    seconds = {"median": again, "min": 0.5, "max": 2.0, "n": 5}
    together = {"survivor_stopped": seconds, "all_run_again": seconds, "victim_again": seconds, "n": 5, "said": []}
    alone = together | {"survivor_stopped": None, "all_run_again": None}
    image = {"Lockstep": {"after": seconds, "n": 1, "said": []}, "JobSet": {"after": None, "n": 1, "said": []}}
    return {"start": {"Lockstep": {"all_run": seconds}}, "exit": {"Lockstep": together, "JobSet": alone}, "image": image}


def verdicts(measured: dict[str, Any]) -> dict[str, bool | None]:
    return {goal.name: goal.met for goal in goals(measured)}


def test_a_goal_is_met_up_to_its_bound() -> None:
    assert set(verdicts(result()).values()) == {True}


def test_a_goal_is_not_met_beyond_its_bound() -> None:
    missed = {name for name, met in verdicts(result(lockstep=10.1, own_cpu=15.1)).items() if met is False}
    assert missed == {*(f"apply → all pods at {nodes} nodes, p50" for nodes in (2, 16, 64)), "own CPU per job at 64 nodes"}


def test_a_restart_that_takes_longer_than_a_second_misses_its_goal() -> None:
    assert [name for name, met in verdicts({"faults": faults(again=1.01)}).items() if met is False] == [
        "exit 1 → all run again, default backoff"
    ]


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


def test_what_never_happened_is_called_so_beside_the_rank_that_came_back_alone() -> None:
    rows = tables({"faults": faults()}).splitlines()
    assert "| exit 1 | Lockstep | 1 [0.5..2] | 1 [0.5..2] | 5 |" in rows
    assert "| exit 1 | JobSet | never | never; the rank alone 1 [0.5..2] | 5 |" in rows


def test_a_heartbeat_file_says_when_its_process_began_was_last_heard_and_obeyed() -> None:
    assert life("1-10.500", "10.500\n10.550\n") == Life("1", 10.5, 10.55)
    assert life("1-10.500", "10.500\nexit 10.600\n") == Life("1", 10.5, 10.6, 10.6)


def test_a_line_that_is_still_being_written_is_not_read() -> None:
    assert life("0-1.000", "1.000\n1.0") == Life("0", 1.0, 1.0)
    assert life("0-1.000", "1.0") is None


def test_a_job_runs_while_every_rank_beats() -> None:
    lives = [Life("0", 1, 9.9), Life("1", 1, 9.8)]
    assert running(lives, 10, 2) == lives
    assert not running(lives, 11, 2)
    assert not running(lives[:1], 10, 2)
    assert not running([lives[0], Life("1", 1, 9.9, obeyed=9.9)], 10, 2)  # it hangs


OLD = [Life("0", 1, 10.2), Life("1", 1, 10, obeyed=10)]
"""Rank 1 had a fault at 10, and rank 0 was stopped 0.2 s later."""


def test_an_outcome_counts_from_the_fault_to_the_last_of_those_that_run_together() -> None:
    again = [Life("0", 11, 12.9), Life("1", 11.5, 12.9)]
    assert outcome([*OLD, *again], "1", 10, 13) == Outcome(pytest.approx(0.2), 1.5, 1.5)


def test_a_survivor_that_was_replaced_has_ended_however_soon() -> None:
    assert outcome([*OLD, Life("0", 10.3, 10.3), Life("1", 10.3, 10.3)], "1", 10, 10.4) == Outcome(
        pytest.approx(0.2), pytest.approx(0.3), pytest.approx(0.3)
    )


def test_a_survivor_that_goes_on_was_not_stopped_and_its_job_does_not_run_anew() -> None:
    lives = [Life("0", 1, 19.9), OLD[1], Life("1", 12, 19.9)]
    assert outcome(lives, "1", 10, 20) == Outcome(None, None, 2)


def test_a_rank_that_came_back_and_ended_again_does_not_count_as_running() -> None:
    lives = [*OLD, Life("0", 11, 19.9), Life("1", 11, 11.5), Life("1", 14, 19.9)]
    assert outcome(lives, "1", 10, 20) == Outcome(pytest.approx(0.2), 4, 1)


def test_conditions_are_one_line_each() -> None:
    status = {
        "conditions": [{"type": "Failed", "status": "True", "reason": "Max", "message": "too often"}, {"type": "Ready", "status": "False"}]
    }
    assert conditions(status) == ["Failed=True Max: too often", "Ready=False"]
    assert conditions({}) == []
