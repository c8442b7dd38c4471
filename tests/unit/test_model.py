"""What the models share."""

from __future__ import annotations

from decimal import Decimal

import pytest

from lockstep.api.model import quantity_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "1"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        ("1k", "1000"),
        ("1M", "1000000"),
        ("1Ki", "1024"),
        ("1Gi", "1073741824"),
        ("2Ti", "2199023255552"),
    ],
)
def test_a_quantity_is_the_number_that_kubernetes_takes_it_for(text: str, value: str) -> None:
    assert quantity_value(text) == Decimal(value)
