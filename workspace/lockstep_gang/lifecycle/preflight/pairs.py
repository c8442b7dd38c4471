"""Which node makes an all-reduce slow (pure): pairs of nodes, then those in doubt each with a node that is known to be good.

A node is good once a pair with it was fast; it is bad when a pair of it and a good one was slow. Every round has its deadline and
there are only so many rounds, so the search ends whatever hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS_MAX = 4


@dataclass(frozen=True)
class Measurement:
    """What an all-reduce of some nodes brought: bytes a second of bus bandwidth, 0 with an error."""

    nodes: tuple[int, ...]
    bytes_per_second: int
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """`unclear`: slow with everyone they were measured with, of whom nobody is known to be good."""

    bad: tuple[int, ...]
    unclear: tuple[int, ...]


def judge(nodes: int, pairs: Sequence[Measurement], minimum: int) -> Verdict:
    good = _good(pairs, minimum)
    slow = [set(pair.nodes) for pair in pairs if pair.bytes_per_second < minimum]
    doubtful = [node for node in range(nodes) if node not in good and any(node in pair for pair in slow)]
    bad = tuple(node for node in doubtful if any(node in pair and pair & good for pair in slow))
    return Verdict(bad, tuple(node for node in doubtful if node not in bad))


def next_pairs(nodes: int, pairs: Sequence[Measurement], minimum: int, rounds: int) -> tuple[tuple[int, ...], ...]:
    """The pairs of the next round, `rounds` having been made; none: nothing more can be learnt."""
    if rounds == 0:
        return tuple((node, node + 1) for node in range(0, nodes - 1, 2))
    if rounds >= ROUNDS_MAX:
        return ()
    good, verdict = _good(pairs, minimum), judge(nodes, pairs, minimum)
    known = {*good, *verdict.bad}
    doubtful = [node for node in range(nodes) if node not in known]
    measured = {frozenset(pair.nodes) for pair in pairs}
    return _matched(doubtful, sorted(good), measured) if good else _reshuffled(doubtful, measured)


def _good(pairs: Sequence[Measurement], minimum: int) -> set[int]:
    return {node for pair in pairs if pair.bytes_per_second >= minimum for node in pair.nodes}


def _matched(doubtful: list[int], good: list[int], measured: set[frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Each of the doubtful with a good one of its own, as far as there are enough of them."""
    free, found = list(good), []
    for node in doubtful:
        partner = next((other for other in free if frozenset((node, other)) not in measured), None)
        if partner is not None:
            free.remove(partner)
            found.append((partner, node))
    return tuple(found)


def _reshuffled(doubtful: list[int], measured: set[frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Nobody is known to be good yet: other pairs than before."""
    free, found = list(doubtful), []
    while free:
        node = free.pop(0)
        partner = next((other for other in free if frozenset((node, other)) not in measured), None)
        if partner is not None:
            free.remove(partner)
            found.append((node, partner))
    return tuple(found)
