"""What only the cluster knows of the job's nodes, as the operator's replies say it (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_gang.contract.reply import Fact, FactType
from lockstep_gang.contract.report import Restart

LOSSES = frozenset(
    {FactType.NODE_LOST, FactType.PREEMPTED, FactType.EVICTED, FactType.OUT_OF_MEMORY, FactType.CONTAINER_ENDED, FactType.DELETED}
)
OWN_FAULTS = frozenset({FactType.OUT_OF_MEMORY, FactType.CONTAINER_ENDED})
"""The cluster explains them, and they count toward the restart budget: the same may come again."""


@dataclass(frozen=True)
class Facts:
    """Empty without an operator, and until it has answered."""

    told: tuple[Fact, ...] = ()
    """As in the operator's last reply."""
    heard_at: float = 0.0
    """When it came, Unix time."""
    left: tuple[Restart, ...] = ()
    """Nodes that were told to go in the last attempt, as entries of the history: they become ones when a fact says who told them, or the next
    attempt starts without such a fact."""

    def waiting(self, node: int) -> str | None:
        """Why the node's pod doesn't run, for example `x-1 (ImagePulling)`; None when nobody says."""
        of_node = [fact for fact in self.told if fact.node == node]
        found = next((fact for fact in of_node if fact.type is FactType.WAITING), of_node[-1] if of_node else None)
        return f"{found.pod} ({found.reason})" if found is not None else None
