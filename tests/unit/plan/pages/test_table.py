"""What `get` and `describe` say of a job, from its object alone."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from lockstep.plan.pages.load import load_page
from lockstep.plan.pages.table import COLUMNS, WIDE, age, describe, row

NOW = datetime.fromisoformat("2026-11-21T12:00:00+00:00").timestamp()


def job(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "demo", "namespace": "ns", "creationTimestamp": "2026-11-21T10:00:00Z"},
        "spec": {"nodes": 2, "training": {"model": {"name": "/m"}, "zeroStage": "Stage3"}},
        "status": status,
    }


RUNNING = job(
    nodes=2,
    ranks={"desired": 8, "ready": 7},
    restarts=1,
    restartsCountTowardsMax=1,
    restartHistory=[{"attempt": 1, "cause": "Hang", "message": "rank 5 hangs", "lostSteps": 13, "downtimeSeconds": 74}],
    cluster={"name": "barcelona", "transport": "RDMA"},
    trainer={
        "activity": "Step", "step": 120, "totalSteps": 500, "progressPercentage": 24, "estimatedRemainingSeconds": 8400,
        "metrics": [{"name": "loss", "value": "1.83"}],
    },
    checkpoint={"lastCommittedStep": 100, "lastCommitTime": "2026-11-21T11:50:00Z", "path": "/workspace/runs/demo/checkpoints/step-100.a1"},
    conditions=[{"type": "Progressing", "status": "True", "reason": "Running", "message": "all ranks run"}],
)  # fmt: skip


def test_a_row_has_a_cell_for_every_column() -> None:
    cells = row(RUNNING, NOW, WIDE)
    assert len(cells) == len(WIDE)
    assert cells[: len(COLUMNS)] == ("demo", "2/2", "7/8", "120/500", "24%", "1", "Running", "2h")
    assert cells[len(COLUMNS) :] == ("barcelona", "RDMA", "100", "2h20m", "1.83", "all ranks run")


def test_a_job_that_nobody_has_looked_at_yet_has_a_row_too() -> None:
    bare = {"metadata": {"name": "x"}, "spec": {}}
    assert row(bare, NOW, WIDE) == ("x", "0/?", "0/?", "-", "-", "0", "Unknown", "-", "-", "-", "-", "-", "-", "")


def test_a_job_that_has_ended_has_the_nodes_and_ranks_that_it_had() -> None:
    over = {"conditions": [{"type": "Complete", "status": "True", "reason": "Complete", "message": ""}]}
    ended = {"metadata": {"name": "x"}, "spec": {"nodes": 2}, "status": {**over, "nodes": 0, "ranks": {"ready": 0, "desired": 16}}}
    assert row(ended, NOW)[1:3] == ("2", "16")
    unstated = {"metadata": {"name": "x"}, "spec": {}, "status": over}
    assert row(unstated, NOW)[1:3] == ("-", "-")
    assert row(unstated, NOW, default_nodes=2)[1:3] == ("2", "-")


def test_a_job_that_states_no_nodes_has_those_of_its_cluster() -> None:
    job = {"metadata": {"name": "x"}, "spec": {}, "status": {"runningNodes": 1, "ranks": {"ready": 1, "desired": 2}}}
    assert row(job, NOW, default_nodes=2)[1:3] == ("1/2", "1/2")


def test_the_page_of_a_running_job_says_what_it_does_and_what_restarts_cost() -> None:
    page = "\n".join(describe(RUNNING, [], NOW, "in namespace ns"))
    for part in (
        "demo (in namespace ns, 2h old)",
        "training of /m (LoRA, Stage3)",
        "Cluster     barcelona, between nodes RDMA",
        "7 of 8 ready, on 2 of 2 nodes",
        "120/500 (Step, 2h20m left)",
        "loss 1.83",
        "step 100, 10m ago, /workspace/runs/demo/checkpoints/step-100.a1",
        "attempt 1, Hang: rank 5 hangs (13 steps lost, 1m14s down)",
        "none are kept any more",
    ):
        assert part in page


ENDED = [{"type": "Complete", "status": "True", "reason": "Complete", "message": ""}]
TIMED = {"step": 7, "totalSteps": 9, "estimatedRemainingSeconds": 60}
FAILURE = {"cause": "UserCode", "message": "rank 1 on node 0 exited with 1: ValueError: no data", "lastLines": ["a", "ValueError: no data"]}


def with_spec(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "x", "namespace": "ns"}, "spec": spec}


@pytest.mark.parametrize(
    ("described", "line"),
    [
        (job(restarts=3, restartsCountTowardsMax=1, restartHistory=RUNNING["status"]["restartHistory"]),
            "Restarts    3; since the last new checkpoint 1 failure, of those that restart.maxRestarts counts"),
        (job(trainer={"step": 7, "totalSteps": 9}), "Step        7/9"),
        (job(trainer=TIMED), "Step        7/9 (1m left)"),
        (job(trainer={**TIMED, "activity": "Export"}, conditions=ENDED), "Step        7/9"),
        (job(failure=FAILURE), "Failure     UserCode: rank 1 on node 0 exited with 1: ValueError: no data"),
        (job(failure=FAILURE), "            | ValueError: no data"),
        (job(), "  none yet: does an operator work here? (lockstep doctor)"),
        (with_spec(type="Interactive"), "Work        dev environment: runs what it is asked to"),
        (with_spec(script={"path": "train.py", "args": ["--x"]}), "Work        script train.py --x"),
        (with_spec(script={"module": "pkg.train", "args": ["--x"]}), "Work        script -m pkg.train --x"),
        (with_spec(script={"command": ["bash", "run.sh"]}), "Work        script bash run.sh"),
    ],
)  # fmt: skip
def test_a_page_has_the_line_of_what_is_known_of_a_job(described: dict[str, Any], line: str) -> None:
    assert line in list(describe(described, [], NOW, "in namespace ns"))


def test_the_page_says_what_the_fabric_is_what_the_time_went_into_and_where_ranks_are() -> None:
    verified = {"type": "FabricVerified", "status": "True", "reason": "RDMA", "message": "IB on every rank"}
    status = {"ranks": {"desired": 8, "ready": 8, "order": [0, 2, 1]}, "fabric": {"transport": "RDMA"}, "goodput": {"percentage": 93}}
    page = list(describe(job(conditions=[verified], **status), [], NOW, "in namespace ns"))
    assert "Fabric      RDMA, verified: IB on every rank" in page
    assert "Order       ranks follow the racks: nodes 0, 2, 1" in page
    assert "Goodput     93% of the time that its pods were there, up to its newest step, was training" in page
    ended = [{"type": "Failed", "status": "True", "reason": "RanksFailed", "message": ""}]
    assert "Goodput     93% of the time that its pods were there was training" in list(
        describe(job(conditions=ended, **status), [], NOW, "in namespace ns")
    )


def test_a_time_in_the_future_is_no_age() -> None:
    assert age("2026-11-21T12:00:05Z", NOW) == "0s"


def test_of_a_node_eight_nics_with_traffic_are_shown() -> None:
    lines = list(
        load_page([{"node": 0, "pod": "x-0", "ranks": [0], "gigabits": {f"eth{number}": [1.0, 1.0] for number in range(12)}}], None)
    )
    assert [line.split()[-3] for line in lines[1:]] == [f"eth{number}" for number in range(8)]


def test_less_than_half_a_megabit_is_no_traffic() -> None:
    lines = list(load_page([{"node": 0, "pod": "x-0", "ranks": [0], "gigabits": {"a": [0.0004, 0.0], "b": [0.0006, 0.0004]}}], None))
    assert [line.split()[-3:] for line in lines[1:]] == [["b", "0.001", "0"]]
