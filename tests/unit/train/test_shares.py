"""When a run's samples are divided anew, and what is measured for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_spec.choices import Balance, Batches
from lockstep_spec.shares import RankTime, StepTimes
from lockstep_train.assemble import refuse_other_nodes
from lockstep_train.balance import WATCHED_STEPS, Shares, Sizes, measured_shares, renew, sizes_of
from lockstep_train.base.errors import ConfigError
from lockstep_train.engine.measure import MeasuredRank, rank_time, step_times
from lockstep_train.memory.agree import Asked

SHORTEST_SECONDS = 1e-9
TIMES = StepTimes((RankTime(0.1, 1), RankTime(0.1, 1)))
LENGTHS = [10] * 12


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


def sizes(*samples: int, batches: Batches = Batches.TOKENS) -> Sizes:
    return Sizes(batches, samples, 100)


def shares(times: StepTimes | None = TIMES, most: int = 100, *, measured: bool = True) -> Shares:
    return Shares(sizes(most, most), [0, 1], times, measured=measured)


def watched(seconds: list[float], steps: int = WATCHED_STEPS + 1, **options: Any) -> Shares:
    """Shares after so many steps; the seconds that come with the first are of a step before."""
    result = shares(**options)
    for step in range(steps):
        result.divide(LENGTHS, step)
        result.see(seconds)
    return result


def counts(run: Shares) -> list[int]:
    """Samples of each rank."""
    return [sum(map(len, turns)) for turns in run.divide(LENGTHS, 0).micro_batches]


def test_a_rank_that_holds_the_others_up_for_fifty_steps_gets_fewer_tokens_at_the_commit() -> None:
    run, ranks, events = watched([60.0, 120.0]), Alone(), Events()
    renew(run, 60, ranks, events)  # type: ignore[arg-type]
    assert counts(run) == [8, 4]
    assert ranks.keys == ["balance/60"]
    assert events.lines == ["Balance after step 60: a step's tokens by speed: 67 % on rank 0, 33 % on rank 1"]
    assert run.proposal() is None, "what was watched were other shares"


@pytest.mark.parametrize(
    ("seconds", "steps", "options"),
    [
        ([60.0, 120.0], WATCHED_STEPS, {}),  # one of them is of the shares before
        ([60.0, 80.0], WATCHED_STEPS + 1, {}),  # 14 % above the mean
        ([60.0, 120.0], WATCHED_STEPS + 1, {"measured": False}),
        ([60.0, 120.0], WATCHED_STEPS + 1, {"times": None}),
    ],
)
def test_otherwise_shares_stay_and_nothing_is_said(seconds: list[float], steps: int, options: dict[str, Any]) -> None:
    run, ranks, events = watched(seconds, steps, **options), Alone(), Events()
    renew(run, 60, ranks, events)  # type: ignore[arg-type]
    assert (counts(run), ranks.keys, events.lines) == ([6, 6], [], [])


def test_a_few_slow_steps_change_nothing() -> None:
    run = watched([60.0, 60.0])
    for step in range(WATCHED_STEPS // 2 - 1):
        run.divide(LENGTHS, step)
        run.see([60.0, 600.0])
    assert run.proposal() is None


def test_a_rank_is_slow_only_beside_what_its_tokens_should_take() -> None:
    unlike = StepTimes((RankTime(0, 1), RankTime(0, 1)))
    run = Shares(sizes(6, 2), [0, 1], unlike)
    assert counts(run) == [9, 3]
    assert run.expected == [1.5, 0.5]
    assert shares(times=None).expected == [1, 1]


def test_after_a_change_by_what_was_observed_the_next_one_starts_there() -> None:
    run = watched([60.0, 120.0])
    proposal = run.proposal()
    assert proposal.ranks[1].token_seconds == pytest.approx(2 * proposal.ranks[0].token_seconds)
    run.take(proposal)
    run.divide(LENGTHS, 0)
    assert run.expected == pytest.approx([1, 1], rel=0.2)


@pytest.mark.parametrize(
    ("balance", "batches"), [(Balance.EQUAL, Batches.TOKENS), (Balance.EQUAL, Batches.ROWS), (Balance.MEASURED, Batches.ROWS)]
)
def test_equal_shares_are_neither_measured_nor_told(balance: Balance, batches: Batches) -> None:
    first = Shares(sizes_of(batches, balance, 4, (4, 9 if balance is Balance.MEASURED else 4), 100), (0, 1))
    assert first.sizes.samples == (4, 4)

    def measure(samples: int) -> MeasuredRank:
        raise AssertionError

    assert measured_shares(first, 4, balance, measure, Alone(), Events()) is first  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("balance", "samples", "expected", "line"),
    [
        (Balance.EQUAL, (6, 2), [9, 3], "Balance: a step's tokens by the sizes stated: 75 % on rank 0, 25 % on rank 1"),
        (Balance.MEASURED, (9, 9), [8, 4], "Balance: a step's tokens by speed: 67 % on rank 0, 33 % on rank 1"),
    ],
)
def test_stated_sizes_are_shares_and_measured_ones_are_rooms(
    balance: Balance, samples: tuple[int, int], expected: list[int], line: str
) -> None:
    """The other rank takes twice as long."""
    first = Shares(sizes_of(Batches.TOKENS, balance, 4, samples, 100), (0, 1))
    asked: list[int] = []

    def measure(samples: int) -> MeasuredRank:
        asked.append(samples)
        return MeasuredRank(RankTime(0, 1), 0.5)

    events = Events()
    run = measured_shares(first, 4, balance, measure, Alone(), events)  # type: ignore[arg-type]
    assert (counts(run), asked, events.lines) == (expected, [4], [line])
    assert run.expected == pytest.approx([6 / 5, 4 / 5] if balance is Balance.EQUAL else [1, 1])


def test_evaluation_takes_no_more_samples_at_once_than_any_rank_may() -> None:
    assert shares(most=3).most_rows(4) == 3
    assert shares(most=9).most_rows(4) == 4


def test_times_lie_on_a_line_that_neither_falls_nor_begins_below_zero() -> None:
    assert rank_time(3.0, 9.0, 4, 10) == RankTime(1.0, 0.2)
    assert rank_time(9.0, 3.0, 4, 10) == RankTime(3.0 - 40 * SHORTEST_SECONDS, SHORTEST_SECONDS)
    assert rank_time(0.1, 8.0, 4, 10) == RankTime(0.0, 0.2)
    assert rank_time(2.0, 2.0, 1, 10) == RankTime(0.0, 0.2)


def test_who_waits_least_waits_for_the_network_alone() -> None:
    measured = [MeasuredRank(RankTime(0, 1), 4.5), MeasuredRank(RankTime(0, 5), 0.5)]
    assert step_times(measured) == StepTimes((RankTime(0, 1), RankTime(0, 5)), 0.5)


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        (Asked(4, 0, Balance.EQUAL), 4),
        (Asked(4, 6, Balance.EQUAL), 6),
        (Asked(4, 6, Balance.MEASURED), 6),
        (Asked(4, 0, Balance.MEASURED), 4),
    ],
)
def test_without_a_memory_plan_no_rank_gets_more_than_is_stated(asked: Asked, most: int) -> None:
    assert asked.most(None) == most


def test_a_run_file_states_every_node_or_none() -> None:
    ranks: Any = SimpleNamespace(nodes=2)
    refuse_other_nodes((), ranks)
    refuse_other_nodes((4, 0), ranks)
    with pytest.raises(ConfigError, match="has 3 numbers, but the run has 2 nodes"):
        refuse_other_nodes((4, 4, 4), ranks)
