"""Changes of a status that may wait a moment, because the next one is on its way already (pure).

A start passes through "0 of 2 pods created", "scheduling", "1 of 2 pods run" and "all pods run" within a second or two. A thousand starts would be
thousands of writes that nobody reads. A trouble, a refusal, an end, and all that the gang reports is written at once.
"""

from __future__ import annotations

from lockstep.api.objects import Object, condition
from lockstep.api.status import ConditionType
from lockstep.plan.reasons import Reason

SETTLE_SECONDS = 2.0
"""How long a change may wait for the next."""
_ON_THE_WAY = frozenset({Reason.PODS_NOT_CREATED, Reason.SCHEDULING, Reason.STARTING})
_NOT_READY = frozenset({Reason.PODS_NOT_SCHEDULED, Reason.STARTING, Reason.WAITING_FOR_REPORT})
_CONDITIONS = frozenset({ConditionType.PODS_SCHEDULED, ConditionType.RANKS_READY, ConditionType.PROGRESSING, ConditionType.SUSPENDED})
_FIELDS = frozenset({"conditions", "observedGeneration", "nodes", "runningNodes", "startTime", "active", "ranks", "run", "cluster"})


def is_passing(before: Object, after: Object) -> bool:
    """Whether the two differ only by how far the start of a job's pods has come, a resumed job's included."""
    if _reason(before, ConditionType.PROGRESSING) not in _ON_THE_WAY | {Reason.SUSPENDED}:
        return False
    if _reason(after, ConditionType.PROGRESSING) not in _ON_THE_WAY or _reason(after, ConditionType.RANKS_READY) not in _NOT_READY:
        return False
    return _others(before) == _others(after)


def _reason(status: Object, kind: ConditionType) -> str:
    return str(condition(status, kind).get("reason", ""))


def _others(status: Object) -> tuple[Object, dict[str, tuple[str, str, str]]]:
    """All but what a start changes."""
    said = {c["type"]: (c["status"], c["reason"], c["message"]) for c in status.get("conditions", []) if c["type"] not in _CONDITIONS}
    return {key: value for key, value in status.items() if key not in _FIELDS}, said
