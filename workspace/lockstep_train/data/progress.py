"""That the data is being prepared or the model fetched, known to all ranks: hours of it are fine as long as it moves, so a load is begun anew with every
line that a builder says. Only one in which nothing moves ends at its limit.

All ranks begin as many parts, in the end as many as the builder that said most: the watchdogs compare how many places each has come to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from lockstep_train.base import limits
from lockstep_train.base.ranks import Ranks
from lockstep_train.watch import Watch


class Progress:
    """Of one rank. Builders use `told`, those who wait for them `follow`."""

    def __init__(self, ranks: Ranks, watch: Watch, topic: str = "data", activity: str = "Load") -> None:
        """`topic`: of the store's keys."""
        self._ranks = ranks
        self._topic = topic
        self._activity = activity
        self._watch = watch
        self._parts = 0

    def told(self, line: str) -> None:
        """This rank, a builder, has come further."""
        self._begin(self._parts + 1, line)
        self._ranks.store.set(self._key(self._ranks.node), json.dumps([self._parts, line]))

    def follow(self, builders: Iterable[int]) -> None:
        """Begin what these nodes have begun since the last look."""
        for builder in builders:
            if self._ranks.store.check([self._key(builder)]):
                parts, line = json.loads(self._ranks.store.get(self._key(builder)))
                self._begin(parts, line)

    def _begin(self, parts: int, line: str) -> None:
        """The name changes with each part, for the agent, too, restarts its clock only for another one."""
        while self._parts < parts:
            self._parts += 1
            self._watch.begin(f"{self._activity}, part {self._parts + 1}", limits.LOAD_SECONDS)
            self._watch.at(line)

    def _key(self, node: int) -> str:
        return f"{self._topic}/told/{node}"
