"""The documentation names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_failure_modes_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/reference/failure-modes.md").read_text()))
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    missing = [name for name in sorted(named) if not any(f"def {name}(" in source for source in sources)]
    assert named
    assert missing == []
