"""Small runs for the tests of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def usual() -> dict[str, Any]:
    """Four micro-batches a step, the last of a single sample, which two ranks and three share unequally: what is saved and loaded doesn't
    depend on more.
    """
    return {"optimization": {"globalBatchSize": 7}, "evaluation": {"samples": 3}}
