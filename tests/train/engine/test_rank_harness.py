"""The tests' own groups of ranks: a variant that fails is the only one that does."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_harness import ForkServer


def test_a_variant_that_fails_on_one_rank_leaves_the_others_their_results(ranks: ForkServer, tmp_path: Path) -> None:
    variants = {"first": "ends", "raising": "raises", "second": "ends", "killed": "dies", "third": "ends"}
    outcomes = ranks.run_each("end_as_told", 2, variants, tmp_path / "results.json")
    assert outcomes == {"first": "ends", "second": "ends", "third": "ends"}
    assert outcomes.failures.keys() == {"raising", "killed"}
    with pytest.raises(AssertionError, match="ValueError: raises"):
        outcomes["raising"]
