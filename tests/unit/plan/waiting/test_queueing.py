"""A job in a queue: what its pods wait for, and a change of the queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.api.objects import Object
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.platforms.operator.memory.objects import StoredObject
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, asked, condition, gone, pod, report, running, settled
from unit.plan.reconcile.test_stop import going, stopped_report

KUEUE = "kueue.x-k8s.io/admission"
LABEL = "kueue.x-k8s.io/queue-name"


def gated(gate: str, **spec: str) -> Observed:
    held: Object = {"containers": [], "schedulingGates": [{"name": gate}]}
    told = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "Scheduling is blocked"}
    pods = (pod(node, spec=held, status={"phase": "Pending", "conditions": [told]}) for node in (0, 1))
    return replace(running(**spec), pods=tuple(StoredObject("Pod", item).item for item in pods))  # as the operator sees them


@pytest.mark.parametrize(
    ("observed", "says"),
    [
        (gated(KUEUE, queueName="team-a"),
            "the job waits in Kueue's queue team-a until it fits the quota (kubectl get localqueue,workloads -n ns)"),
        (gated("example.com/hold"), "the scheduling gates example.com/hold hold the pods back: the controller that set them has to remove"
                                    " them"),
        (gated(KUEUE), f"the scheduling gates {KUEUE}"),
    ],
    ids=["kueue", "other", "no queue"],
)  # fmt: skip
def test_pods_behind_a_gate_say_whom_they_wait_for(observed: Observed, says: str) -> None:
    plan = reconcile(observed, None, CONTEXT, NOW)
    assert condition(plan, "PodsScheduled")[:2] == ("False", "Queued")
    assert says in condition(plan, "PodsScheduled")[2]
    assert condition(plan, "Progressing")[:2] == ("False", "Queued")
    assert (plan.apply, plan.create) == ((), ())
    assert [(note.type, note.reason) for note in plan.events if note.reason == "Queued"] == [("Normal", "Queued")]


def test_time_in_the_queue_doesnt_count_toward_the_deadline() -> None:
    observed = asked(gated(KUEUE, queueName="team-a"), activeDeadlineSeconds=1)
    plan = reconcile(observed, None, CONTEXT, NOW + 1000)
    assert "active" not in plan.status


def test_another_queue_waits_for_the_next_start_and_gets_a_new_statefulset_then() -> None:
    observed = asked(settled(report(), queueName="team-a"), queueName="team-b")
    plan = reconcile(observed, report(), CONTEXT, NOW + 1)
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())
    assert plan.status["run"]["pending"] is True
    asleep = gone(going(asked(observed, suspend=True)))
    started = reconcile(asked(asleep, suspend=False), stopped_report(), CONTEXT, NOW + 20)
    assert "StatefulSet" in [item["kind"] for item in started.delete]  # Kueue lets nobody change the queue of one
    without = replace(asked(asleep, suspend=False), objects={k: v for k, v in asleep.objects.items() if k[0] != "StatefulSet"})
    made = [item for item in reconcile(without, stopped_report(), CONTEXT, NOW + 21).create if item["kind"] == "StatefulSet"]
    assert [item["metadata"]["labels"][LABEL] for item in made] == ["team-b"]
