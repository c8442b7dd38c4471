"""Why pods were taken away, kept after the pods are gone: a coordinator hears of it with its next report, or its successor does."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.plan.facts import loss_of, losses
from lockstep.plan.observed import Object, Observed
from lockstep.platforms.kubernetes.queue import Key
from lockstep_gang.contract import Fact

KEPT_SECONDS = 3600.0
KEPT_MAX = 256
"""Of one job."""


class RememberedLosses:
    """In memory only. What an operator's end takes along leaves a loss unexplained, which then counts as a restart."""

    def __init__(self) -> None:
        self._of: dict[Key, dict[str, tuple[Fact, float]]] = {}

    def see(self, key: Key, observed: Observed, now: float) -> None:
        """Keep what its pods show now; a pod that is there and shows nothing is not lost any more."""
        there = {str(pod["metadata"]["uid"]) for pod in observed.pods}
        found = losses(observed)
        if not found and key not in self._of:
            return
        kept = {u: (f, at) for u, (f, at) in self._of.get(key, {}).items() if u not in there and now - at < KEPT_SECONDS}
        kept |= {uid: (fact, now) for uid, fact in found.items()}
        self._of[key] = dict(list(kept.items())[-KEPT_MAX:])
        if not kept:
            del self._of[key]

    def see_pod(self, key: Key, pod: Object, now: float) -> None:
        """At once, since a pod that makes room may be gone before its job is looked at."""
        fact = loss_of(pod, {})
        if fact is not None:
            self._of.setdefault(key, {}).setdefault(str(pod["metadata"]["uid"]), (fact, now))

    def of(self, key: Key) -> Mapping[str, Fact]:
        """uid of the pod → what happened to it."""
        return {uid: fact for uid, (fact, _) in self._of.get(key, {}).items()}

    def forget(self, key: Key) -> None:
        self._of.pop(key, None)
