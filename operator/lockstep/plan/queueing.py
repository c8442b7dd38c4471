"""Pods that a queue holds back: Kueue's StatefulSet integration puts a gate on them until the whole job fits its quota (pure).

Lockstep only writes the queue's name on the StatefulSet. Kueue's webhook does the rest on the pod template, and the scheduler leaves gated
pods alone; from the job's side it is a wait like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.plan.layers import Notice
from lockstep.plan.observed import Object, Observed

KUEUE_GATES = frozenset({"kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology"})


def is_gated(pod: Object) -> bool:
    return bool(pod["spec"].get("schedulingGates"))


def why_gated(observed: Observed, waiting: Sequence[Object]) -> Notice | None:
    """Why the scheduler may not place these pods yet; None: nothing holds them back."""
    gates = sorted({gate["name"] for pod in waiting for gate in pod["spec"].get("schedulingGates") or []})
    if not gates:
        return None
    queue = observed.job["spec"].get("queueName")
    if queue is not None and KUEUE_GATES.issuperset(gates):
        look = f"kubectl get localqueue,workloads -n {observed.namespace}"
        return Notice("Queued", f"the job waits in Kueue's queue {queue} until it fits the quota ({look})")
    return Notice("Queued", f"the pods are held back by the scheduling gates {', '.join(gates)}: whoever set them has to lift them")
