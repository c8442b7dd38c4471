"""How a step's samples are divided over ranks and micro-batches, where ranks are alike or unlike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_spec.shares import (
    Division,
    RankTime,
    StepTimes,
    divide_by_rows,
    divide_by_tokens,
    expected_shares,
    idle_words,
    shares_of,
    shares_text,
    times_as_observed,
)

LONGEST = 20
TIMES = st.builds(RankTime, st.floats(0, 5), st.floats(0.01, 5))
RANKS = st.lists(st.tuples(TIMES, st.integers(1, 5)), min_size=1, max_size=4)
LENGTHS = st.lists(st.integers(1, LONGEST), min_size=1, max_size=40)


def times_of(*ranks: RankTime, network: float = 0.0) -> StepTimes:
    return StepTimes(ranks, network)


def alike(count: int) -> StepTimes:
    return times_of(*[RankTime(0, 1)] * count)


def places(division: Division) -> list[int]:
    return sorted(place for turns in division.micro_batches for micro in turns for place in micro)


def turns(division: Division) -> int:
    (each,) = {len(turns) for turns in division.micro_batches}
    return each


def samples(division: Division) -> list[int]:
    """Of each rank."""
    return [sum(map(len, turns)) for turns in division.micro_batches]


@settings(max_examples=300)
@given(LENGTHS, RANKS, st.floats(0, 5), st.integers(0, 9))
def test_each_sample_is_computed_once_in_a_micro_batch_with_room_for_it(
    lengths: list[int], ranks: list[tuple[RankTime, int]], network: float, first: int
) -> None:
    rooms = [size * LONGEST for _, size in ranks]
    division = divide_by_tokens(lengths, rooms, times_of(*(time for time, _ in ranks), network=network), first)
    assert places(division) == list(range(len(lengths)))
    for room, micro_batches, tokens in zip(rooms, division.micro_batches, division.tokens, strict=True):
        assert [sum(lengths[place] for place in micro) or min(lengths) for micro in micro_batches] == list(tokens), (
            "an empty one computes the shortest"
        )
        assert max(tokens) <= room
    assert len({len(tokens) for tokens in division.tokens}) == 1


def tokens_of(division: Division, lengths: list[int]) -> int:
    """Tokens computed beside those of empty micro-batches."""
    empty = sum(micro == () for micro_batches in division.micro_batches for micro in micro_batches)
    return sum(map(sum, division.tokens)) - empty * min(lengths)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 5))
def test_ranks_that_are_alike_make_no_more_micro_batches_than_rows_and_compute_no_more(lengths: list[int], count: int, size: int) -> None:
    by_tokens = divide_by_tokens(lengths, [size * LONGEST] * count, alike(count))
    by_rows = divide_by_rows(lengths, [size] * count)
    assert turns(by_tokens) <= turns(by_rows)
    assert tokens_of(by_tokens, lengths) == sum(lengths) <= tokens_of(by_rows, lengths)
    loads = [sum(tokens) for tokens in by_tokens.tokens]
    assert max(loads) - min(loads) <= turns(by_tokens) * max(lengths)


@given(LENGTHS, st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
def test_rows_take_the_samples_in_their_order_and_pad_them_to_the_longest(lengths: list[int], sizes: list[int]) -> None:
    division = divide_by_rows(lengths, sizes)
    in_order = [place for turn in range(turns(division)) for rank in division.micro_batches for place in rank[turn]]
    assert in_order == list(range(len(lengths)))
    for size, micro_batches, tokens in zip(sizes, division.micro_batches, division.tokens, strict=True):
        assert all(len(micro) <= size for micro in micro_batches)
        assert list(tokens) == [len(micro) * max((lengths[place] for place in micro), default=0) or min(lengths) for micro in micro_batches]


def test_the_longest_goes_first_and_each_to_the_micro_batch_that_ends_soonest_with_it() -> None:
    division = divide_by_tokens([3, 9, 1, 8, 4], [16, 16], alike(2))
    assert division.micro_batches == (((0, 1, 2),), ((3, 4),))
    assert division.tokens == ((13,), (12,))


def test_of_equal_choices_another_rank_gets_the_longest_in_each_step() -> None:
    longest = [divide_by_tokens([9, 5, 5], [20] * 3, alike(3), first=step).tokens.index((9,)) for step in range(3)]
    assert longest == [0, 1, 2]


def test_tokens_follow_the_speed_of_three_unlike_cards() -> None:
    times = times_of(RankTime(0, 1), RankTime(0, 1 / 0.55), RankTime(0, 1 / 0.5), network=0.5)
    division = divide_by_tokens([10] * 24, [1000] * 3, times)
    assert (samples(division), turns(division)) == ([12, 6, 6], 1)
    assert max(division.seconds(times)) == pytest.approx(120)


def test_a_room_moves_tokens_to_the_others_and_not_above_it() -> None:
    assert samples(divide_by_tokens([10] * 18, [80, 80, 20], times_of(*[RankTime(30, 1)] * 3))) == [8, 8, 2]


def test_a_slow_rank_with_much_room_is_not_filled_to_save_a_micro_batch() -> None:
    times = times_of(RankTime(0, 1), RankTime(0, 10))
    division = divide_by_tokens([10] * 16, [80, 80], times)
    assert turns(division) == 2
    assert samples(division) == [16, 0]


def test_time_that_each_micro_batch_takes_makes_few_large_ones() -> None:
    assert turns(divide_by_tokens([10] * 32, [80] * 2, times_of(RankTime(10, 1), RankTime(10, 1.01)))) == 2
    assert turns(divide_by_tokens([10] * 32, [80] * 2, times_of(RankTime(0, 1), RankTime(0, 1.01), network=10))) == 2


def test_no_micro_batch_is_left_almost_empty() -> None:
    division = divide_by_tokens([10] * 18, [80] * 2, alike(2))
    assert sorted(tokens for turns in division.tokens for tokens in turns) == [40, 40, 50, 50]


def test_observed_steps_scale_the_times_that_were_measured() -> None:
    times = times_of(RankTime(1, 1), RankTime(1, 2), network=3)
    assert times_as_observed(times, [1.0, 2.0]) == times_of(RankTime(1, 1), RankTime(2, 4), network=3)


def test_the_expected_time_of_a_rank_is_relative_to_the_mean() -> None:
    assert expected_shares([6.0, 2.0]) == [1.5, 0.5]


def test_shares_are_those_of_the_speeds_in_words() -> None:
    shares = shares_of(times_of(RankTime(0, 1), RankTime(7, 2), RankTime(0, 2)))
    assert shares == [0.5, 0.25, 0.25]
    assert shares_text(shares) == "50 % on rank 0, 25 % on ranks 1-2"
    assert shares_text([1.0]) == "100 % on rank 0"


@pytest.mark.parametrize(
    ("sizes", "batch", "words"),
    [
        ((1,) * 16, 4, "12 of 16 have nothing to do in any step. State a globalBatchSize of 16 or more, or use fewer ranks"),
        ((4,) * 4, 8, "2 of 4 have nothing to do in any step. State a globalBatchSize of 16 or more, a microBatchSize of 2, or use"),
        ((4,) * 4, 13, ""),
        ((1,) * 16, 20, ""),
        ((4, 0), 4, ""),
    ],
)
def test_ranks_without_a_sample_in_any_step_are_counted_with_what_gives_them_some(sizes: tuple[int, ...], batch: int, words: str) -> None:
    assert words in idle_words(sizes, batch) and bool(idle_words(sizes, batch)) == bool(words)
