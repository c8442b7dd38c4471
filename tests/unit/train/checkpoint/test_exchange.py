"""Who reads what for whom when volumes hold some shards each: every element once, from near where it can be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lockstep_train.checkpoint.format.layout import shard_file
from lockstep_train.checkpoint.format.manifest import FragmentRecord, ShardRecord
from lockstep_train.checkpoint.format.shards import ShardPiece, ShardReader, nearest_holder, planned_pieces
from lockstep_train.checkpoint.resume import _verdict
from lockstep_train.zero.zero_access import RangeNeed
from support.checkpoint_cases import manifest

NUMEL = 103


def cut(parts: int) -> list[tuple[int, int]]:
    """Start and length of equal parts, the last one shorter."""
    size = -(-NUMEL // parts)
    return [(min(part * size, NUMEL), max(0, min(size, NUMEL - part * size))) for part in range(parts)]


def reader(saved: int) -> ShardReader:
    shards = [
        ShardRecord(shard_file(rank, saved), 1, "0", (FragmentRecord("w", (NUMEL,), start, numel),))
        for rank, (start, numel) in enumerate(cut(saved))
    ]
    return ShardReader(Path("nowhere"), manifest(*shards))


def planned(saved: int, ranks: int, holders: list[list[int]], nodes: list[int], *, whole: bool) -> tuple[list[ShardPiece], list[RangeNeed]]:
    needs = [RangeNeed(start, numel, whole) for start, numel in cut(ranks)]
    return list(planned_pieces(reader(saved), "w", [{"w": need} for need in needs], nearest_holder(holders, nodes))), needs


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("saved", "ranks"), [(1, 3), (2, 2), (3, 2), (4, 3), (2, 7)])
def test_every_rank_gets_each_element_that_it_needs_once(saved: int, ranks: int, whole: bool) -> None:
    draw = random.Random(saved * 10 + ranks)  # noqa: S311 (test data)
    for _ in range(20):
        nodes = sorted(draw.choices(range(3), k=ranks))
        holders = [sorted(draw.sample(range(ranks), k=draw.randint(1, ranks))) for _ in range(saved)]
        plan, needs = planned(saved, ranks, holders, nodes, whole=whole)
        for rank, need in enumerate(needs):
            for kind in ("fp32", "exp_avg", "exp_avg_sq"):
                mine = [piece for piece in plan if piece.receiver == rank and piece.kind == kind]
                elements = sorted(element for piece in mine for element in range(piece.start, piece.start + piece.numel))
                wanted = range(NUMEL) if whole and kind == "fp32" else range(need.start, need.start + need.numel)
                assert elements == list(wanted)


def test_what_a_node_s_volume_has_never_travels_and_what_it_lacks_comes_from_who_has_it() -> None:
    """Shard 0 is on node 0 (rank 0 checked it), shard 1 on node 1 (rank 2) and as a copy on node 0 (rank 1)."""
    plan, _ = planned(2, 4, [[0], [1, 2]], [0, 0, 1, 1], whole=False)
    assert {(piece.sender, piece.receiver) for piece in plan if piece.span.shard == 1} == {(2, 2), (3, 3)}
    assert {(piece.sender, piece.receiver) for piece in plan if piece.span.shard == 0} == {(0, 0), (1, 1)}
    plan, _ = planned(2, 4, [[0], [1]], [0, 0, 1, 1], whole=False)
    traveled = sum(piece.numel for piece in plan if piece.sender != piece.receiver)
    assert traveled == 3 * sum(numel for _, numel in cut(4)[2:])
    assert {piece.sender for piece in plan if piece.sender != piece.receiver} == {1}


def test_a_shard_that_is_whole_somewhere_makes_up_for_one_that_is_damaged_elsewhere() -> None:
    answers = [
        {"node": 0, "shards": {"0": None, "1": "shard 1 is damaged"}},
        {"node": 1, "shards": {"0": "shard 0 is missing", "1": None}},
    ]
    assert _verdict(answers, 2) == {"problem": None, "holders": [[0], [1]], "nodes": [0, 1]}


def test_of_a_shard_that_nobody_has_whole_the_damage_is_told_rather_than_that_others_lack_it() -> None:
    answers = [{"node": 0, "shards": {"0": "shard 0 is missing"}}, {"node": 1, "shards": {"0": "shard 0 is damaged"}}]
    assert _verdict(answers, 1) == {"problem": "shard 0 is damaged"}
