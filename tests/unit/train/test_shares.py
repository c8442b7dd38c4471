"""When a run's samples are split anew, and what is measured for it."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_spec.choices import Balance
from lockstep_spec.shares import Bounds, RankTime, Split, StepTimes, split_by
from lockstep_train.balance import WATCHED_STEPS, Shares, SplitDecision, first_shares, measured_shares, renew
from lockstep_train.base.errors import ConfigError
from lockstep_train.engine.measure import MeasuredRank, rank_time, step_times
from lockstep_train.memory.agree import Agreed, Asked

SHORTEST_SECONDS = 1e-6

TIMES = StepTimes((RankTime(0.1, 1), RankTime(0.1, 1)))


class Alone:
    """Rank 0, whose answers are everybody's."""

    rank, world_size, first = 0, 2, True

    def __init__(self) -> None:
        self.keys: list[str] = []

    def publish(self, key: str, value: Any) -> Any:
        self.keys.append(key)
        return value

    def gather(self, key: str, value: Any) -> list[Any]:
        self.keys.append(key)
        return [value, [2 * item for item in value]]


class Events:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def event(self, kind: str, *, line: str, **fields: Any) -> None:
        assert kind == "balance"
        self.lines.append(line)


def shares(times: StepTimes | None = TIMES, most: int = 100, *, least: int = 0, renewed: bool = True) -> Shares:
    return Shares(split_by([6, 6], 12), [Bounds(least, most)] * 2, [0, 1], 12, times, renewed=renewed)


def watched(seconds: list[float], steps: int = WATCHED_STEPS + 1, **options: Any) -> Shares:
    """Shares after so many steps, of which the first is one before the split."""
    result = shares(**options)
    for _ in range(steps):
        result.see(seconds)
    return result


def test_a_rank_that_holds_the_others_up_for_fifty_steps_gets_fewer_samples_at_the_commit() -> None:
    run, ranks, events = watched([6.0, 12.0]), Alone(), Events()
    assert renew(run, 60, ranks, events)  # type: ignore[arg-type]
    assert run.split == Split((8, 4), 1)
    assert ranks.keys == ["balance/60"]
    assert events.lines == [
        "Balance after step 60: samples at once: rank 0 on node 0 6 → 8, rank 1 on node 1 6 → 4; micro-batches a step: 1"
    ]
    assert run.proposal() is None, "what was watched was another split"


@pytest.mark.parametrize(
    ("seconds", "steps", "options"),
    [
        ([6.0, 12.0], WATCHED_STEPS, {}),  # one of them is of the split before
        ([6.0, 8.0], WATCHED_STEPS + 1, {}),  # 14 % above the mean
        ([6.0, 12.0], WATCHED_STEPS + 1, {"renewed": False}),
        ([6.0, 12.0], WATCHED_STEPS + 1, {"times": None}),
    ],
)
def test_otherwise_shares_stay_and_nobody_is_asked(seconds: list[float], steps: int, options: dict[str, Any]) -> None:
    run, ranks, events = watched(seconds, steps, **options), Alone(), Events()
    assert not renew(run, 60, ranks, events)  # type: ignore[arg-type]
    assert (run.split, ranks.keys, events.lines) == (Split((6, 6), 1), [], [])


def test_a_few_slow_steps_change_nothing() -> None:
    run = watched([6.0, 6.0])
    for _ in range(WATCHED_STEPS // 2 - 1):
        run.see([6.0, 60.0])
    assert run.proposal() is None


def test_where_no_split_would_be_faster_nothing_is_said_and_fifty_more_steps_are_watched() -> None:
    run, ranks, events = watched([6.0, 12.0], least=6, most=6), Alone(), Events()
    assert not renew(run, 60, ranks, events)  # type: ignore[arg-type]
    assert events.lines == []
    assert run.proposal() is None


def test_after_a_split_by_what_was_observed_the_next_one_starts_there() -> None:
    run = watched([6.0, 12.0])
    proposal = run.proposal()
    assert proposal is not None
    assert proposal.times.ranks[1].sample_seconds == pytest.approx(2 * proposal.times.ranks[0].sample_seconds)
    run.take(proposal)
    assert run.expected == pytest.approx([1, 1], rel=0.2)


def test_equal_shares_are_neither_measured_nor_told() -> None:
    first = first_shares(Agreed(1, (Bounds(4, 4), Bounds(4, 4)), (0, 1)), 4, 12)
    assert first.split == Split((4, 4), 2)

    def measure(samples: int) -> MeasuredRank:
        raise AssertionError

    assert measured_shares(first, 12, Balance.EQUAL, measure, Alone(), Events()) is first  # type: ignore[arg-type]


@pytest.mark.parametrize(("balance", "sizes"), [(Balance.EQUAL, (6, 2)), (Balance.MEASURED, (6, 6))])
def test_stated_sizes_stay_but_are_measured_to_know_who_is_slow(balance: Balance, sizes: tuple[int, int]) -> None:
    bounds = tuple(Bounds(size, size) for size in sizes)
    first = first_shares(Agreed(1, bounds, (0, 1)), 4, 12)
    asked: list[int] = []

    def measure(samples: int) -> MeasuredRank:
        asked.append(samples)
        return MeasuredRank(RankTime(0, 1), 0.5)

    run = measured_shares(first, 12, balance, measure, Alone(), Events())  # type: ignore[arg-type]
    assert (run.split, asked) == (first.split, [6])
    assert run.expected == pytest.approx([6 / 5, 4 / 5] if sizes == (6, 2) else [1, 1])  # the other rank takes twice as long


def test_evaluation_takes_no_more_samples_at_once_than_any_rank_may() -> None:
    assert shares(most=3).most_rows(4) == 3
    assert shares(most=9).most_rows(4) == 4


def test_times_lie_on_a_line_that_neither_falls_nor_begins_below_zero() -> None:
    assert rank_time(3.0, 9.0, 4) == RankTime(1.0, 2.0)
    assert rank_time(9.0, 3.0, 4) == RankTime(3.0 - 4 * SHORTEST_SECONDS, SHORTEST_SECONDS)
    assert rank_time(0.1, 8.0, 4) == RankTime(0.0, 2.0)
    assert rank_time(2.0, 2.0, 1) == RankTime(0.0, 2.0)


def test_who_waits_least_waits_for_the_network_alone() -> None:
    measured = [MeasuredRank(RankTime(0, 1), 4.5), MeasuredRank(RankTime(0, 5), 0.5)]
    assert step_times(measured) == StepTimes((RankTime(0, 1), RankTime(0, 5)), 0.5)


@pytest.mark.parametrize(
    ("asked", "bounds"),
    [
        (Asked(4, 0, Balance.EQUAL), Bounds(4, 4)),
        (Asked(4, 6, Balance.EQUAL), Bounds(6, 6)),
        (Asked(4, 6, Balance.MEASURED), Bounds(6, 6)),
        (Asked(4, 0, Balance.MEASURED), Bounds(0, 4)),
    ],
)
def test_without_a_memory_plan_no_rank_gets_more_than_is_stated(asked: Asked, bounds: Bounds) -> None:
    assert asked.bounds(None) == bounds


def test_a_decision_survives_the_store() -> None:
    from lockstep_spec.codec import from_json, to_json

    decision = SplitDecision(Split((6, 2), 3), StepTimes((RankTime(0.1, 1), RankTime(0.0, 2)), 0.5))
    assert from_json(SplitDecision, to_json(decision), "balance") == decision


def test_a_run_file_states_every_node_or_none() -> None:
    from types import SimpleNamespace

    from lockstep_train.assemble import refuse_other_nodes

    ranks: Any = SimpleNamespace(nodes=2)
    refuse_other_nodes((), ranks)
    refuse_other_nodes((4, 0), ranks)
    with pytest.raises(ConfigError, match="has 3 numbers, but the run has 2 nodes"):
        refuse_other_nodes((4, 4, 4), ranks)
