"""Durations, sizes, counts and lists read the same everywhere."""

from __future__ import annotations

import pytest

from lockstep_spec.modelnames import folder_name
from lockstep_spec.words import binary_size, clauses, decimal_size, duration, listed, named, number_of, step_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.9, "0s"), (59, "59s"), (60, "1m"), (190, "3m10s"), (3599, "59m59s"), (3900, "1h5m"), (7200, "2h"), (86400, "1d"),
        (86400 * 4 + 3 * 3600, "4d3h"), (86400 + 60, "1d")],
)  # fmt: skip
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.34, "340ms"), (1.234, "1.23s"), (13.1, "13.1s"), (99.96, "100s"), (100, "1m40s"), (7199.5, "1h59m")]
)
def test_a_step_s_duration_has_three_digits(seconds: float, text: str) -> None:
    assert step_duration(seconds) == text


def test_sizes_of_files_and_devices_are_decimal() -> None:
    sizes = (0, 999, 1000, 2.5e6, 80e9, 3e12)
    assert [decimal_size(size) for size in sizes] == ["0 B", "999 B", "1.0 kB", "2.5 MB", "80.0 GB", "3.0 TB"]


def test_sizes_that_kubernetes_limits_are_binary() -> None:
    assert [binary_size(size) for size in (1023, 2**20, 3 * 2**29, 64 * 2**30, 2**41)] == ["1023 B", "1 MiB", "1.5 GiB", "64 GiB", "2 TiB"]


def test_one_of_a_thing_has_no_plural() -> None:
    assert [number_of(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_lists_have_eight_items_or_three_clauses_and_say_how_many_more_there_are() -> None:
    assert [listed(range(count)) for count in (8, 10)] == ["0, 1, 2, 3, 4, 5, 6, 7", "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"]
    assert [named("pod", "a" * count) for count in (1, 2, 9)] == ["pod a", "pods a, a", "pods a, a, a, a, a, a, a, a and 1 more"]
    assert [clauses(["a fails"] * count) for count in (3, 5)] == ["a fails; a fails; a fails", "a fails; a fails; a fails; and 2 more"]


def test_a_folder_of_a_long_model_s_name_has_200_characters() -> None:
    names = [f"org/{'a' * 500}{number}" for number in range(2)]
    assert [len(folder_name(name)) for name in names] == [200, 200] and len(set(map(folder_name, names))) == 2
    assert folder_name("org/model") == "org--model"
