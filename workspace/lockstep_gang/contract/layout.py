"""Layout of the ranks: the node of each rank and the ranks of each node. Nobody else computes them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class RankLayout:
    """`counts`: the number of ranks of every node, at least 1; `order`: the nodes in the order of their ranks, empty: by their numbers."""

    counts: tuple[int, ...]
    order: tuple[int, ...] = ()

    @cached_property
    def _firsts(self) -> list[int]:
        """The first rank of each position, and behind the last one the number of all ranks."""
        counts = [self.counts[node] for node in self.order] if self.order else self.counts
        return [0, *accumulate(counts)]

    @property
    def world_size(self) -> int:
        return self._firsts[-1]

    def position_of(self, node: int) -> int:
        """torchrun's GROUP_RANK."""
        return self.order.index(node) if self.order else node

    def ranks_of(self, node: int) -> range:
        position = self.position_of(node)
        return range(self._firsts[position], self._firsts[position + 1])

    def node_of(self, rank: int) -> int:
        """Raises IndexError for a rank that isn't there."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
        position = bisect_right(self._firsts, rank) - 1
        return self.order[position] if self.order else position

    def local_rank_of(self, rank: int) -> int:
        """The rank's place among those of its node. Raises IndexError for a rank that isn't there."""
        return rank - self.ranks_of(self.node_of(rank)).start


def equal_layout(nodes: int, ranks_per_node: int, order: Sequence[int] = ()) -> RankLayout:
    return RankLayout((ranks_per_node,) * nodes, tuple(order))
