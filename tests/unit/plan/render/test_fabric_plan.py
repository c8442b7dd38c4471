"""What run.json asks of the fabric, and how the verdict becomes condition and status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from golden.plan_cases import cluster, job, profile, rdma_profile
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.run import build_run, pod_placement
from lockstep_gang.build import build_id
from lockstep_gang.contract.fabric import DifferingRanks, FabricAsked, FabricReason, FabricReport, Verified
from lockstep_gang.contract.report import State
from lockstep_gang.contract.run import parse_run, run_text
from lockstep_spec.choices import DegradedPolicy
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, condition, report, running

NCCL = "NCCL_DEBUG"
REPORT = FabricReport(
    Verified.FALSE, FabricReason.FELL_BACK_TO_TCP, "asked for RDMA, rank 1 on node 1 uses sockets (eth0)", transport="TCP",
        network="Socket",
    interfaces=("eth0",), nccl_version="2.29.7", ranks_heard=2, differing=(DifferingRanks(1, "1", "use sockets (eth0)"),),
)  # fmt: skip


def asked(a_job: Any, a_profile: Any) -> FabricAsked:
    resolved = resolve(a_job, a_profile)
    run = build_run(resolved, pod_placement(resolved, None))
    assert parse_run(run_text(run)) == run and run.build == build_id()
    assert run.fabric is not None
    return run.fabric


def test_barcelona_asks_for_its_four_devices_and_gpudirect() -> None:
    expected = FabricAsked("RDMA", ("=mlx5_6", "=mlx5_7", "=mlx5_10", "=mlx5_11"), gpu_direct=True, nccl_debug="INFO")
    assert asked(job(), cluster("barcelona")) == expected


def test_tcp_asks_for_nothing_but_sockets() -> None:
    found = asked(job(fabric={"mode": "TCP", "degradedPolicy": "Fail"}), cluster("barcelona"))
    assert found == FabricAsked("TCP", degraded_policy=DegradedPolicy.FAIL, nccl_debug="INFO")


@pytest.mark.parametrize(
    ("rdma", "spec", "expected"),
    [
        ({}, {}, {}),  # nothing stated, nothing expected
        ({"rails": [{"network": "a"}, {"network": "b"}]}, {}, {"rails": 2}),
        ({"rails": [{"network": "a"}, {"network": "b"}], "devices": ["mlx5_0"]}, {}, {"hcas": ("=mlx5_0",)}),
        ({"devices": ["mlx5"]}, {}, {"hcas": ("mlx5",)}),
        ({"devices": ["mlx5_0"]}, {"env": [{"name": "NCCL_IB_HCA", "value": "=mlx5_1,mlx5_2"}]},
            {"hcas": ("=mlx5_1", "=mlx5_2")}),
        ({"devices": ["mlx5_0"]}, {"env": [{"name": "NCCL_IB_HCA", "value": "^mlx5_3"}]}, {"hcas": ()}),
        ({"gdrLevel": "SYS"}, {}, {"gpu_direct": True}),
        ({"gdrLevel": "LOC", "dmabuf": True}, {}, {"gpu_direct": False}),
        ({"dmabuf": True}, {}, {"gpu_direct": True}),
        ({"dmabuf": False}, {}, {"gpu_direct": False}),
        ({"gdrLevel": "SYS"}, {"env": [{"name": "NCCL_NET_GDR_LEVEL", "value": "0"}]}, {"gpu_direct": False}),
    ],
)  # fmt: skip
def test_what_the_variables_of_the_ranks_ask_for_is_expected(rdma: dict[str, Any], spec: dict[str, Any], expected: dict[str, Any]) -> None:
    assert asked(job(**spec), rdma_profile(**rdma)) == FabricAsked("RDMA", **expected)


@pytest.mark.parametrize(
    ("stated", "spec", "shown"),
    [
        ({"debug": "WARN"}, {}, "WARN"),
        ({}, {}, None),
        ({"debug": "WARN", "env": [{"name": NCCL, "value": "INFO"}]}, {}, None),
        ({"debug": "WARN"}, {"env": [{"name": NCCL, "value": "INFO"}]}, None),
    ],
)
def test_the_profiles_debug_says_what_is_shown_unless_somebody_sets_the_variable(
    stated: dict[str, Any], spec: dict[str, Any], shown: str | None
) -> None:
    assert asked(job(gpusPerNode=1, **spec), profile(nccl=stated)).nccl_debug == shown


def test_before_any_report_nothing_is_known() -> None:
    assert condition(reconcile(running(), None, CONTEXT, NOW), "FabricVerified") == ("Unknown", "NotStarted", "no rank has been started")


def test_the_verdict_becomes_condition_and_status_with_the_nodes_name() -> None:
    plan = reconcile(running(), report(fabric=REPORT), CONTEXT, NOW)
    assert condition(plan, "FabricVerified") == ("False", "FellBackToTCP", REPORT.message)
    assert plan.status["fabric"] == {
        "transport": "TCP", "network": "Socket", "hcas": [], "interfaces": ["eth0"], "ncclVersion": "2.29.7", "ranksHeard": 2,
        "differing": [{"node": 1, "nodeName": "node-1", "ranks": "1", "why": "use sockets (eth0)"}],
    }  # fmt: skip


def test_what_was_verified_stays_said_without_reports_and_after_the_end() -> None:
    observed = running()
    known = after(observed, reconcile(observed, report(fabric=REPORT), CONTEXT, NOW))
    silent = reconcile(known, None, CONTEXT, NOW + 5)
    status = silent.status or known.status
    assert condition(replace(known, job={**known.job, "status": status}), "FabricVerified")[1] == "FellBackToTCP"
    assert status["fabric"]["differing"][0]["nodeName"] == "node-1"
    ended = reconcile(replace(known, pods=()), report(State.COMPLETE), CONTEXT, NOW + 9)
    assert condition(ended, "FabricVerified")[1] == "FellBackToTCP"


def test_a_verdict_is_written_at_once() -> None:
    observed = running()
    known = after(observed, reconcile(observed, report(), CONTEXT, NOW))
    assert reconcile(known, report(fabric=REPORT), CONTEXT, NOW + 1).status is not None


def test_more_than_status_can_hold_is_cut() -> None:
    many = replace(REPORT, hcas=tuple(f"mlx5_{i}" for i in range(99)), differing=REPORT.differing * 99, network="n" * 99)
    plan = reconcile(running(), report(fabric=many), CONTEXT, NOW)
    fabric = plan.status["fabric"]
    assert (len(fabric["hcas"]), len(fabric["differing"]), len(fabric["network"])) == (64, 32, 64)
