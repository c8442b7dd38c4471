"""Agents as processes, for the tests of what they do together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.gang.cases import Gang, gang


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Gang]:
    with gang(tmp_path) as made:
        yield made
