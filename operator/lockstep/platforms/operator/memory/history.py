"""History of jobs that this operator has seen and may not see again: why pods were taken away, and what those that are there run."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import astuple

from lockstep.api.objects import Object
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.podfacts import deletion_of, loss_of, losses
from lockstep.plan.render.objects import Frozen, GangRun
from lockstep.platforms.operator.memory.queue import Key
from lockstep_gang.contract.reply import Fact

RUN_BYTES_MAX = 32 * 1024
"""Compressed; most have 3 KB. Jobs of a megabyte each are no reason to remember as much of all of them."""
KEPT_SECONDS = 3600.0
KEPT_MAX = 256
"""Most losses of one job."""


class RememberedRuns:
    """The frozen run of every job that has pods, by the job's uid: its ConfigMap can be deleted by anybody, and its gang needs it to start
    again.

    In memory only, as compressed text; not of a job with a very large one. The next leader reads the ConfigMaps.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, bool, bytes]] = {}

    def of(self, uid: str) -> GangRun | None:
        if uid not in self._of:
            return None
        _, proven, text = self._of[uid]
        return GangRun(Frozen(*json.loads(zlib.decompress(text))), proven)

    def see(self, uid: str, run: GangRun | None) -> None:
        """Remember the run; None if no pod is there, or nobody knows what they run."""
        if run is None:
            self._of.pop(uid, None)
        elif self._of.get(uid, ("", False))[:2] != (run.run.hash, run.proven):
            text = zlib.compress(json.dumps(astuple(run.run)).encode(), 1)
            self._of.pop(uid, None)
            if len(text) <= RUN_BYTES_MAX:
                self._of[uid] = run.run.hash, run.proven, text

    def forget(self, uids: set[str]) -> None:
        """Keep those of these jobs only."""
        self._of = {uid: run for uid, run in self._of.items() if uid in uids}


class RememberedLosses:
    """Losses of pods: a coordinator hears of them with its next report, or its successor does.

    In memory only. What an operator's end takes along leaves a loss unexplained, which then counts as a restart.
    """

    def __init__(self) -> None:
        self._of: dict[Key, dict[str, tuple[Fact, float]]] = {}

    def see(self, key: Key, observed: Observed, now: float) -> None:
        """Keep what its pods show now; a pod that is there and shows nothing is not lost any more."""
        present = {str(pod["metadata"]["uid"]) for pod in observed.pods}
        facts = losses(observed)
        if not facts and key not in self._of:
            return
        remembered = {u: (f, at) for u, (f, at) in self._of.get(key, {}).items() if u not in present and now - at < KEPT_SECONDS}
        remembered |= {uid: (fact, now) for uid, fact in facts.items()}
        self._of[key] = dict(list(remembered.items())[-KEPT_MAX:])
        if not remembered:
            del self._of[key]

    def see_pod(self, key: Key, pod: Object, now: float) -> None:
        """Remember its loss at once, since a pod that makes room may be gone before its job is looked at."""
        self._keep(key, pod, loss_of(pod, {}), now)

    def see_gone(self, key: Key, pod: Object, job: Object | None, stateful_set: Object | None, now: float) -> None:
        """A pod that is not there any more: one that was deleted by force never was seen to end."""
        self._keep(key, pod, loss_of(pod, {}) or deletion_of(pod, job, stateful_set), now)

    def _keep(self, key: Key, pod: Object, fact: Fact | None, now: float) -> None:
        if fact is not None:
            self._of.setdefault(key, {}).setdefault(str(pod["metadata"]["uid"]), (fact, now))

    def of(self, key: Key) -> Mapping[str, Fact]:
        """uid of the pod → what happened to it."""
        return {uid: fact for uid, (fact, _) in self._of.get(key, {}).items()}

    def forget(self, key: Key) -> None:
        self._of.pop(key, None)
