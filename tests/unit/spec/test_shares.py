"""How many samples each rank computes at once, where ranks are unlike."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_spec.shares import (
    Bounds,
    RankTime,
    Split,
    StepTimes,
    better_split,
    expected_shares,
    fastest_split,
    idle_words,
    sizes_text,
    split_by,
    stated_sizes,
    step_seconds,
    times_as_observed,
)

TIMES = st.builds(RankTime, st.floats(0, 5), st.floats(0.01, 5))
BOUNDS = st.one_of(
    st.integers(1, 5).map(lambda most: Bounds(0, most)),
    st.integers(1, 5).map(lambda size: Bounds(size, size)),
)


def times_of(*ranks: RankTime, network: float = 0.0) -> StepTimes:
    return StepTimes(ranks, network)


RANKS = st.lists(st.tuples(TIMES, BOUNDS), min_size=1, max_size=3)


@settings(max_examples=300)
@given(RANKS, st.integers(1, 12), st.floats(0, 5))
def test_no_other_split_within_the_bounds_takes_less_time(ranks: list[tuple[RankTime, Bounds]], batch: int, network: float) -> None:
    times, bounds = times_of(*(time for time, _ in ranks), network=network), [bound for _, bound in ranks]
    chosen = fastest_split(times, bounds, batch)
    assert all(bound.least <= size <= bound.most for size, bound in zip(chosen.sizes, bounds, strict=True))
    assert sum(chosen.sizes) * chosen.turns >= batch
    others = [split_by(sizes, batch) for sizes in product(*(range(bound.least, bound.most + 1) for bound in bounds)) if sum(sizes) > 0]
    assert step_seconds(chosen, times) == pytest.approx(min(step_seconds(other, times) for other in others))


@given(TIMES, st.floats(0, 30))
def test_the_samples_within_a_time_are_the_most_that_take_no_longer(time: RankTime, seconds: float) -> None:
    samples = time.within(seconds)
    assert samples == 0 or time.seconds(samples) <= seconds
    assert time.seconds(samples + 1) > seconds


def test_samples_follow_the_speed_of_three_unlike_cards() -> None:
    times = times_of(RankTime(0, 1), RankTime(0, 1 / 0.55), RankTime(0, 1 / 0.5), network=0.5)
    split = fastest_split(times, [Bounds(0, 100)] * 3, 24)
    assert (split.sizes, split.turns) == ((12, 6, 6), 1)
    equal = split_by([8, 8, 8], 24)
    assert step_seconds(equal, times) / step_seconds(split, times) == pytest.approx(16.5 / 12.5)


def test_a_cap_moves_samples_to_the_others_and_not_above_it() -> None:
    split = fastest_split(times_of(*[RankTime(3, 1)] * 3), [Bounds(0, 8), Bounds(0, 8), Bounds(0, 2)], 18)
    assert (split.sizes, split.turns) == ((8, 8, 2), 1)


def test_a_stated_size_stays_and_the_others_share_the_rest() -> None:
    split = fastest_split(times_of(RankTime(5, 1), RankTime(5, 2), RankTime(5, 1)), [Bounds(0, 9), Bounds(0, 9), Bounds(2, 2)], 12)
    assert (split.sizes[2], split.turns) == (2, 1)
    assert split.sizes[:2] == (7, 3)


def test_time_that_each_micro_batch_takes_makes_few_large_ones() -> None:
    bounds = [Bounds(0, 8)] * 2
    assert fastest_split(times_of(*[RankTime(10, 1)] * 2), bounds, 32).turns == 2
    assert fastest_split(times_of(*[RankTime(0, 1)] * 2, network=10), bounds, 32).turns == 2


def test_no_micro_batch_is_left_almost_empty() -> None:
    assert fastest_split(times_of(*[RankTime(5, 1)] * 2), [Bounds(0, 8)] * 2, 18) == Split((5, 4), 2)


def test_a_change_must_be_worth_it() -> None:
    equal = split_by([4, 4], 8)
    assert better_split(equal, times_of(RankTime(1, 1), RankTime(1, 1.04)), [Bounds(0, 8)] * 2, 8) is equal
    assert better_split(equal, times_of(RankTime(1, 1), RankTime(1, 3)), [Bounds(0, 8)] * 2, 8).sizes == (6, 2)


def test_observed_steps_scale_the_times_that_were_measured() -> None:
    times, split = times_of(RankTime(1, 1), RankTime(1, 2), network=3), Split((3, 2), 2)
    assert times_as_observed(times, split, [8.0, 20.0]) == times_of(RankTime(1, 1), RankTime(2, 4), network=3)


def test_the_expected_time_of_a_rank_is_relative_to_the_mean() -> None:
    assert expected_shares(Split((6, 2), 1), times_of(RankTime(0, 1), RankTime(0, 1))) == [1.5, 0.5]
    assert expected_shares(Split((4, 4), 1), times_of(RankTime(0, 1), RankTime(0, 2))) == [1, 1], "equal shares: the slower one is slow"
    assert expected_shares(Split((6, 2), 1), None) == [1, 1]


def test_before_any_time_is_known_bounds_alone_limit_the_micro_batch() -> None:
    assert stated_sizes([Bounds(0, 9), Bounds(0, 2), Bounds(6, 6)], 4) == [4, 2, 6]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [((6, 3, 3), "6 on rank 0, 3 on ranks 1-2"), ((4,), "4 on rank 0"), ((1, 2, 1), "1 on rank 0, 2 on rank 1, 1 on rank 2")],
)
def test_sizes_in_words(sizes: tuple[int, ...], text: str) -> None:
    assert sizes_text(sizes) == text


@pytest.mark.parametrize(
    ("split", "batch", "words"),
    [
        (Split((1,) * 16, 1), 4, "12 of 16 have nothing to do in any step. State a globalBatchSize of 16 or more, or use fewer ranks"),
        (
            Split((4,) * 4, 1),
            8,
            "2 of 4 have nothing to do in any step. State a globalBatchSize of 16 or more, a microBatchSize of 2, or use",
        ),
        (Split((4,) * 4, 1), 13, ""),
        (Split((1,) * 16, 2), 20, ""),
        (Split((4, 0), 1), 4, ""),
    ],
)
def test_ranks_without_a_sample_in_any_step_are_counted_with_what_gives_them_some(split: Split, batch: int, words: str) -> None:
    assert words in idle_words(split, batch) and bool(idle_words(split, batch)) == bool(words)
