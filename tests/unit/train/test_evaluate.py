"""When the ranks of an evaluation agree whether they leave it."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep_train.base.ranks import Ranks
from lockstep_train.evaluate import Leaving, turns_between


@pytest.mark.parametrize(
    ("turns", "seconds", "between"),
    [(0, 30.0, 1), (1, 40.0, 1), (1, 2.0, 1), (1, 0.5, 4), (4, 2.0, 4), (10, 0.0, 64), (64, 0.01, 64), (64, 128.0, 1)],
)
def test_ranks_agree_about_every_two_seconds_and_after_64_batches_at_most(turns: int, seconds: float, between: int) -> None:
    assert turns_between(turns, seconds) == between


class Meeting:
    """An all-reduce by the maximum among threads, each of which is a rank."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._barrier = Barrier(ranks, timeout=30)
        self._values: list[torch.Tensor] = []
        monkeypatch.setattr(dist, "all_reduce", self)

    def __call__(self, tensor: torch.Tensor, how: Any) -> None:
        assert how is dist.ReduceOp.MAX
        self._values.append(tensor.clone())
        self._barrier.wait()
        tensor.copy_(torch.stack(self._values).max(dim=0).values)
        if self._barrier.wait() == 0:
            self._values.clear()
        self._barrier.wait()


def turns_of(rank: int, batch_seconds: list[float], asked_at: tuple[int, int]) -> tuple[list[int], int | None]:
    """The turns at which this rank agreed with the others, and the one before which it left; no clock but its own runs."""
    now, agreed = [0.0], []
    turn = 0

    def asked() -> bool:
        agreed.append(turn)
        return (rank, True) == (asked_at[0], turn >= asked_at[1])

    ranks = Ranks(rank, len(batch_seconds), rank, len(batch_seconds), 0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
    leaving = Leaving(ranks, asked, lambda: now[0])
    for turn in range(10_000):
        if leaving(turn):
            return agreed, turn
        now[0] += batch_seconds[rank] * (1 + turn % 3)
    return agreed, None


def test_ranks_of_different_speed_agree_at_the_same_batches_and_leave_before_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = [0.02, 0.3, 0.11]
    Meeting(len(speeds), monkeypatch)
    with ThreadPoolExecutor(len(speeds)) as pool:
        answers = list(pool.map(lambda rank: turns_of(rank, speeds, asked_at=(2, 40)), range(len(speeds))))
    assert answers[0] == answers[1] == answers[2]
    agreed, left = answers[0]
    assert agreed[:2] == [0, 1]
    assert left == agreed[-1]
    assert 40 <= left <= 40 + 2.0 / 0.3
    assert max(later - earlier for earlier, later in itertools.pairwise(agreed)) <= 2.0 / 0.3


def test_a_rank_that_is_asked_long_before_the_ranks_agree_is_heard_then(monkeypatch: pytest.MonkeyPatch) -> None:
    Meeting(2, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda rank: turns_of(rank, [0.0, 0.0], asked_at=(1, 2)), range(2)))
    assert answers[0] == answers[1] == ([0, 1, 65], 65)
