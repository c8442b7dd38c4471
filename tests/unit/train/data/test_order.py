"""Which samples a step trains on: nothing is lost or repeated, whatever the number of ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep_spec import length
from lockstep_spec.shares import RankTime, StepTimes, divide_by_rows, divide_by_tokens
from lockstep_train.data.sequences import batches

ORDER = [1, 10, 5, 8, 9, 0, 2, 4, 7, 3, 11, 6]
"""A resumed run depends on it: it may not change."""


@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 25), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_every_sample_of_every_epoch_is_computed_exactly_once(
    count: int, epochs: int, size: int, world_size: int, micro: int, by_tokens: bool
) -> None:
    plan = length.plan(count=count, epochs=epochs, max_steps=None, global_batch_size=size, world_size=world_size, micro=micro)
    seen: list[int] = []
    for step in range(plan.total_steps):
        batch = batches.global_batch(count, 1, step * size, size, plan.total_samples)
        lengths = [1 + index % 7 for index in batch]
        times = StepTimes((RankTime(0, 1),) * world_size)
        division = (
            divide_by_tokens(lengths, [7 * micro] * world_size, times) if by_tokens else divide_by_rows(lengths, [micro] * world_size)
        )
        assert all(len(share) <= plan.accumulation for share in division.micro_batches)
        taken = [batch[place] for share in division.micro_batches for micro_batch in share for place in micro_batch]
        assert sorted(taken) == sorted(batch)
        seen += batch
    assert sorted(seen) == sorted(list(range(count)) * epochs)
    assert [sorted(seen[epoch * count : (epoch + 1) * count]) for epoch in range(epochs)] == [list(range(count))] * epochs


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = [tuple(batches.epoch_order(50, seed, epoch).tolist()) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert orders[0] == tuple(batches.epoch_order(50, 1, 0).tolist())


def test_the_order_is_the_same_on_every_machine_and_with_every_version_of_every_library() -> None:
    assert batches.epoch_order(12, 42, 0).tolist() == ORDER


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 3), st.integers(0, 50))
def test_the_samples_of_a_step_are_the_same_at_any_number_of_ranks(count: int, size: int, micro: int, cursor: int) -> None:
    batch = batches.global_batch(count, 7, cursor, size, cursor + size)
    for world_size in (1, 2, 3, 4, 7):
        shares = divide_by_rows([1] * size, [micro] * world_size).micro_batches
        assert [batch[place] for turn in zip(*shares, strict=True) for micro_batch in turn for place in micro_batch] == batch


def test_a_run_made_longer_goes_on_where_its_short_last_step_ended() -> None:
    settings = {"count": 10, "max_steps": None, "global_batch_size": 8, "world_size": 2, "micro": 2}
    first = length.plan(epochs=1, **settings)
    assert (first.total_steps, first.cursor(2), first.cursor(3)) == (2, 8, 10)
    longer = length.plan(epochs=2, **settings, done=length.Done(steps=2, samples=10))
    assert (longer.total_steps, longer.cursor(3), longer.cursor(4), longer.cursor(5)) == (4, 10, 18, 20)
    shorter = length.plan(**{**settings, "max_steps": 1}, epochs=1, done=length.Done(steps=2, samples=10))
    assert shorter.total_steps == 2


def test_max_steps_ends_the_run_early() -> None:
    assert length.plan(count=100, epochs=2, max_steps=3, global_batch_size=8, world_size=2, micro=2).total_steps == 3
    assert length.plan(count=10, epochs=1, max_steps=30, global_batch_size=8, world_size=2, micro=2).total_steps == 2
