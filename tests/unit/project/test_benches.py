"""Benches start: a file beside them must not hide a module of the standard library."""

from __future__ import annotations

import sys

from support.checkout import ROOT

BENCHES = ROOT / "tests" / "bench"


def test_no_bench_has_the_name_of_a_standard_module() -> None:
    names = {path.stem for path in BENCHES.glob("*.py")}
    assert names and not names & sys.stdlib_module_names
