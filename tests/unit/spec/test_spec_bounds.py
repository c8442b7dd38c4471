"""What a long value looks like in an error, how much a reader takes at once, and figures of a plan that are bounds."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep_spec.codec import refuse
from lockstep_spec.families import shape_from_config
from lockstep_spec.files import read_regular
from lockstep_spec.fit import most_samples
from lockstep_spec.memory import estimate
from unit.spec.test_sizes import PLACE, SETTINGS, TINY


@pytest.mark.parametrize(("length", "shown"), [(58, f'"{"x" * 58}"'), (59, f'"{"x" * 56}…'), (9999, f'"{"x" * 56}…')])
def test_of_a_value_that_is_refused_sixty_characters_are_shown(length: int, shown: str) -> None:
    assert str(refuse("run.json", "x" * length, "a whole number")) == f"run.json is {shown}, but must be a whole number"


def test_a_small_file_takes_no_more_than_a_mebibyte_to_read_whatever_its_bound(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("x")
    tracemalloc.start()
    try:
        assert read_regular(tmp_path / "small", 1 << 30) == b"x"
        assert tracemalloc.get_traced_memory()[1] < 3 << 19
    finally:
        tracemalloc.stop()


def test_a_micro_batch_has_4096_samples_at_most() -> None:
    assert most_samples(shape_from_config(TINY), SETTINGS, PLACE, 1 << 60) == 4096


@pytest.mark.parametrize(("partition", "gigabytes"), [(1, 0.536870912), (2, 0.805306368)])
def test_each_communicator_of_nccl_takes_a_quarter_of_a_gibibyte(partition: int, gigabytes: float) -> None:
    items = estimate(shape_from_config(TINY), SETTINGS, replace(PLACE, partition=partition))
    assert [item.size_bytes / 1e9 for item in items if item.name.startswith("NCCL")] == [gigabytes]
