"""What only the cluster knows of the job's nodes, as the operator's last reply said it (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_gang.contract.reply import Fact, FactType

LOSSES = frozenset({FactType.NODE_LOST, FactType.PREEMPTED, FactType.EVICTED})


@dataclass(frozen=True)
class Facts:
    """Empty without an operator, and until it has answered."""

    told: tuple[Fact, ...] = ()
    """As in the operator's last reply."""

    def waiting(self, node: int) -> str | None:
        """Why the node's pod doesn't run, for example `x-1 (ImagePulling)`; None when nobody says."""
        found = next((fact for fact in self.told if fact.node == node and fact.type is FactType.WAITING), None)
        found = found or next((fact for fact in reversed(self.told) if fact.node == node), None)
        return f"{found.pod} ({found.reason})" if found is not None else None
