"""The racks of a job's nodes, from the label that its cluster names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.podfacts import facts_of, racks_of
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep_gang.contract.report import State
from unit.gang.test_scale import lines_run
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, PROFILE, after, pod, report, settled


def on_racks(label: str | None = "example.com/rack", **labels: str) -> Observed:
    """Two pods on node-0 and node-1, with these racks."""
    nodes = tuple({"metadata": {"name": name.replace("_", "-"), "labels": {"example.com/rack": rack}}} for name, rack in labels.items())
    spec = {**PROFILE["spec"], "nodes": {"rackLabel": label} if label else {}}
    return replace(settled(report()), profiles=({**PROFILE, "spec": spec},), nodes=nodes)


def test_racks_are_those_of_the_nodes_that_the_pods_are_on() -> None:
    assert racks_of(on_racks(node_0="b", node_1="a", other="c"), 2) == ("b", "a")


def test_a_node_without_the_label_has_no_rack() -> None:
    assert racks_of(on_racks(node_0="b"), 2) == ("b", "")


@pytest.mark.parametrize("unknown", ["label", "node", "pod"])
def test_nothing_is_said_before_everything_is_known(unknown: str) -> None:
    observed = on_racks(None if unknown == "label" else "example.com/rack", node_0="b", node_1="a")
    if unknown == "node":
        observed = replace(observed, pods=(pod(0), {**pod(1), "spec": {}}))
    if unknown == "pod":
        observed = replace(observed, pods=(pod(0),))
    assert racks_of(observed, 2) == ()


def test_a_big_gang_s_reply_takes_time_by_its_nodes_and_not_by_their_square() -> None:
    def work(count: int) -> int:
        pods = tuple({**pod(node), "spec": {"nodeName": f"node-{node}"}} for node in range(count))
        nodes = tuple({"metadata": {"name": f"node-{node}", "labels": {"example.com/rack": "a"}}} for node in range(count))
        observed = replace(on_racks(), pods=pods, nodes=nodes)

        def reply() -> None:
            assert len(racks_of(observed, count)) == count
            facts_of(observed, {})
            assert observed.pod(count - 1) is pods[-1]

        return lines_run(reply)

    small, big = work(64), work(512)
    assert big < small * 9  # eight times as many


def test_status_tells_the_order_of_ranks_and_keeps_it_after_the_end() -> None:
    first = reconcile(settled(), report(order=(1, 0)), CONTEXT, NOW)
    assert first.status is not None and first.status["ranks"]["order"] == [1, 0]
    quiet = reconcile(after(settled(), first), None, CONTEXT, NOW)
    ended = reconcile(after(settled(), first), report(State.COMPLETE), CONTEXT, NOW)
    for plan in (quiet, ended):
        assert (plan.status or first.status)["ranks"]["order"] == [1, 0]


def test_an_order_is_of_the_newest_attempt() -> None:
    first = reconcile(settled(), report(order=(1, 0)), CONTEXT, NOW)
    again = reconcile(after(settled(), first), report(), CONTEXT, NOW)
    assert again.status is not None and "order" not in again.status["ranks"]
