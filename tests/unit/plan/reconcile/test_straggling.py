"""Slow ranks and hung ones in a job's status. No cluster."""

from __future__ import annotations

from lockstep.plan.reconcile.reconcile import reconcile
from lockstep_gang.contract.report import Cause, Failure, State, Straggler
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, condition, report, settled
from unit.plan.reconcile.test_stop import status

SLOW = Straggler(1, 1, "1.42", 60)


def test_a_slow_rank_is_a_condition_with_its_node_and_how_slow_it_is() -> None:
    observed = settled(report())
    assert condition(observed, "Straggling")[:2] == ("False", "NoStraggler")
    plan = reconcile(observed, report(stragglers=(SLOW,)), CONTEXT, NOW + 5)
    state, reason, message = condition(plan, "Straggling")
    assert (state, reason) == ("True", "SlowRank")
    assert message.startswith("rank 1 on node 1 (node-1) takes 1.42 times as long as the others, over 60 steps.")
    assert condition(plan, "Progressing")[:2] == ("True", "Running")
    assert reconcile(after(observed, plan), report(stragglers=(SLOW,)), CONTEXT, NOW + 20).status is None


def test_a_job_without_ranks_has_no_slow_one() -> None:
    observed = settled(report(stragglers=(SLOW,)))
    plan = reconcile(observed, report(State.COMPLETE, 0, result={}, stragglers=(SLOW,)), CONTEXT, NOW + 5)
    assert condition(plan, "Straggling")[0] == "False"


def test_a_hang_is_in_status_with_what_the_rank_was_in_and_where_its_stacks_are() -> None:
    failure = Failure(
        "rank 1 on node 1 hangs: …", 1, 1, cause=Cause.HANG, step=7, activity="Step 8, optimizer", stacks="/workspace/runs/x/logs/h.txt"
    )
    plan = reconcile(settled(report()), report(State.BACKING_OFF, 0, failure=failure), CONTEXT, NOW + 5)
    found = status(plan)["failure"]
    assert (found["cause"], found["rank"], found["nodeName"], found["step"]) == ("Hang", 1, "node-1", 7)
    assert (found["activity"], found["stacks"]) == ("Step 8, optimizer", "/workspace/runs/x/logs/h.txt")
