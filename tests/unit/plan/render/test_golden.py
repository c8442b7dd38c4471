"""Every object of every cluster, line by line. After a meant change: UPDATE_GOLDEN=1 pytest tests/unit/plan/render/test_golden.py, and read
the diff.
"""

from __future__ import annotations

import os

import pytest

from golden.plan_cases import CASES, GOLDEN, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_objects_are_those_of_the_golden_file(case: Case) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        case.path.write_text(case.text(), encoding="utf-8")
    assert case.text() == case.path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.glob("*.yaml")} == {case.path.name for case in CASES}
