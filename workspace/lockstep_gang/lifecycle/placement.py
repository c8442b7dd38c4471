"""Placement of ranks: nodes of one rack are neighbors, so that a ring of ranks crosses each rack's border once (pure).

Decided before every attempt from what the operator says of the racks. Without it ranks follow the nodes' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep_gang.contract.run import Run

WAIT_SECONDS = 3.0
"""Wait of a start for the operator's word, which usually came while the nodes did."""


@dataclass(frozen=True)
class Placement:
    racks: tuple[str, ...] = ()
    """Rack of each node, as the operator last said; empty: it has not. A node without a rack has the empty name."""
    order: tuple[int, ...] = ()
    """Nodes in the order of the newest attempt's ranks; empty: by their numbers."""
    waits_until: float | None = None


def rank_order(racks: Sequence[str]) -> tuple[int, ...]:
    """Nodes in the order of their ranks: racks by their first node, nodes by number within. So node 0, beside the coordinator, has rank
    0.
    """
    first = {rack: node for node, rack in reversed(list(enumerate(racks)))}
    return tuple(sorted(range(len(racks)), key=lambda node: (first[racks[node]], node)))


def with_racks_awaited(placement: Placement, run: Run, now: float) -> Placement:
    """The placement once all nodes are here: the clock of the wait for the operator's word runs, if a word is to come."""
    knows = len(placement.racks) == run.nodes or not run.rack_grouped or run.nodes == 1
    if knows:
        return replace(placement, waits_until=None)
    return placement if placement.waits_until is not None else replace(placement, waits_until=now + WAIT_SECONDS)


def place_ranks(placement: Placement, run: Run) -> Placement:
    """The placement of the attempt that begins now."""
    order = rank_order(placement.racks) if len(placement.racks) == run.nodes else ()
    return Placement(placement.racks, () if order == tuple(range(run.nodes)) else order)


def with_racks(placement: Placement, racks: tuple[str, ...]) -> Placement:
    """The placement after an answer of the operator; one without racks says nothing of them."""
    return replace(placement, racks=racks) if racks else placement


def racks_line(placement: Placement) -> str | None:
    """Line for the log, when ranks don't follow the nodes' numbers."""
    if not placement.order:
        return None
    groups: dict[str, list[int]] = {}
    for node in placement.order:
        groups.setdefault(placement.racks[node], []).append(node)
    named = [f"{', '.join(map(str, nodes))} ({f'rack {rack}' if rack else 'no rack'})" for rack, nodes in groups.items()]
    return f"ranks follow the racks: node {', then '.join(named)}"
