"""Whatever is asked for in whatever order: a gang goes through zero pods between two sizes, and ends as it was asked last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep.plan.observed import Observed, is_terminating
from lockstep.plan.reconcile.reconcile import reconcile
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, asked, fresh, pod
from unit.plan.reconcile.test_stop import leaving

EDITS = st.one_of(
    st.integers(1, 3).map(lambda nodes: {"nodes": nodes}),
    st.booleans().map(lambda suspend: {"suspend": suspend}),
)
EVENTS = st.lists(st.one_of(EDITS, st.sampled_from(["reconcile", "controller", "kubelet"])), max_size=16)


def run_of(observed: Observed) -> str | None:
    """The frozen run that the StatefulSet makes pods of."""
    found = observed.stateful_set
    return None if found is None else str(found["metadata"]["annotations"]["lockstep.dev/run-hash"])


class Simulated:
    """The operator, the StatefulSet's controller and the kubelet, one step at a time."""

    def __init__(self) -> None:
        self.observed: Observed = fresh()
        self.now = NOW

    def edit(self, spec: dict[str, Any]) -> None:
        self.observed = asked(self.observed, **spec)

    def reconcile(self) -> None:
        self.now += 1
        before = self.observed
        self.observed = after(before, reconcile(before, None, CONTEXT, self.now))
        assert run_of(self.observed) == run_of(before) or before.at_zero, "pods of two starts would meet"

    def controller(self) -> None:
        """Scales: tells surplus pods to go, makes missing ones that nothing of the same name is in the way of."""
        pods = {p["metadata"]["name"]: p for p in self.observed.pods}
        wanted = {f"x-{node}": node for node in range(self.observed.replicas)}
        kept = [p if name in wanted else leaving(int(name[-1])) for name, p in pods.items()]
        made = [pod(node) for name, node in wanted.items() if name not in pods]
        self.observed = replace(self.observed, pods=tuple(kept + made))

    def kubelet(self) -> None:
        """One pod that was asked to end is gone."""
        going = [p for p in self.observed.pods if is_terminating(p)]
        self.observed = replace(self.observed, pods=tuple(p for p in self.observed.pods if not going or p is not going[0]))

    def settle(self) -> None:
        for _ in range(8):
            self.reconcile()
            self.controller()
            self.kubelet()


@settings(max_examples=12, phases=[Phase.generate])  # a reconcile renders: no shrinking
@given(EVENTS)
def test_a_gang_is_never_of_two_sizes_and_becomes_what_was_asked_last(events: list[Any]) -> None:
    simulated = Simulated()
    for event in events:
        if isinstance(event, dict):
            simulated.edit(event)
        else:
            getattr(simulated, event)()
    simulated.settle()
    spec = simulated.observed.job["spec"]
    wanted = 0 if spec.get("suspend", False) else spec["nodes"]
    assert sorted(p["metadata"]["name"] for p in simulated.observed.pods) == [f"x-{node}" for node in range(wanted)]
    assert not any(is_terminating(p) for p in simulated.observed.pods)
