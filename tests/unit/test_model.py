"""What the models share."""

from __future__ import annotations

from decimal import Decimal

import pytest

from lockstep.api.quantity import amount, number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "1"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        ("1n", "0.000000001"),
        ("1e3", "1000"),
        ("1k", "1000"),
        ("1M", "1000000"),
        ("1Ki", "1024"),
        ("1Gi", "1073741824"),
        ("2Ti", "2199023255552"),
        ("8Ei", "9223372036854775807"),  # the API server keeps no more
        ("1e999999999", "9223372036854775807"),
    ],
)
def test_a_quantity_is_the_number_that_kubernetes_takes_it_for(text: str, value: str) -> None:
    assert number(text) == amount(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "1Zi", "Gi", "a lot", None])
def test_what_is_no_quantity_is_no_amount_and_counts_for_nothing(text: object) -> None:
    assert amount(text) is None
    assert number(text) == 0
