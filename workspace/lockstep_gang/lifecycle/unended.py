"""Ranks that can't be ended: how long a stop waits for them, and what is said of their nodes (pure).

A process whose system call doesn't return, because a device or a volume doesn't answer, outlives SIGKILL. The attempt is over all the same;
the next one waits for the node, since two attempts' ranks must not share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep_gang.contract.messages import StopMode
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.gang import Gang, Phase
from lockstep_gang.lifecycle.hang import seen

END_SECONDS = 60.0
"""How long nodes may take to end their ranks by SIGKILL; a process that frees much memory needs seconds."""
SHOWN = 5


def busy_nodes(gang: Gang) -> list[int]:
    """Nodes that are here, with ranks of an attempt."""
    return [index for index, node in enumerate(gang.nodes) if node.connected and node.attempt]


def stop_deadline(gang: Gang, run: Run) -> float | None:
    """Until when a stop waits for its nodes; None: nothing is being stopped."""
    if gang.phase is not Phase.STOPPING:
        return None
    return gang.stop_began + END_SECONDS + (run.save_grace_seconds if gang.stopping is StopMode.SAVE else 0)


def is_over(gang: Gang, run: Run, now: float) -> bool:
    """The attempt that is being stopped is concluded: nothing of it is left on any node that can be reached, or its time is over."""
    deadline = stop_deadline(gang, run)
    return deadline is not None and (not gang.nodes.counts.busy or now >= deadline)


def given_up(gang: Gang) -> Gang:
    """The gang whose attempt is concluded: nodes that have ranks yet are known for it."""
    return gang.with_nodes({index: replace(gang.nodes[index], stuck=True) for index in busy_nodes(gang)})


def noted(text: str, gang: Gang, run: Run) -> str:
    """`text`, and which nodes could not end their ranks."""
    note = unended(gang, run, [index for index in busy_nodes(gang) if gang.nodes[index].stuck])
    return text if not note or note in text else f"{text[: max(0, 998 - len(note))]}; {note}"


def unended(gang: Gang, run: Run, nodes: list[int]) -> str:
    """`node 1 could not end rank 3; its process can't be interrupted (state D): …; its node needs a look`; empty without nodes."""
    more = f"; so it is on {len(nodes) - SHOWN} more nodes" if len(nodes) > SHOWN else ""
    return "; ".join(_on_node(gang, run, node) for node in nodes[:SHOWN])[:600] + more


def _on_node(gang: Gang, run: Run, node: int) -> str:
    ranks = list(_left(gang, run, node))
    if not ranks:
        dump = next((dump for dump in gang.dumps if dump.rank in run.ranks_of(node) and dump.state == "D"), None)
        return f"node {node} could not end all processes of attempt {gang.nodes[node].attempt}{seen(dump)}; its node needs a look"
    names = ", ".join(str(rank) for rank in ranks[:SHOWN]) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    dump = next((dump for dump in gang.dumps if dump.rank in ranks and dump.state), None)
    return f"node {node} could not end rank{'s' if len(ranks) > 1 else ''} {names}{seen(dump)}; its node needs a look"


def _left(gang: Gang, run: Run, node: int) -> Iterator[int]:
    if gang.nodes[node].attempt == gang.attempt:
        yield from (rank for rank in run.ranks_of(node) if gang.ranks[rank].exit is None)
