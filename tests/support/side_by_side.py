"""Distribution of tests among the workers of pytest-xdist (`pytest -n 2`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class Parts(LoadScopeScheduling):
    """Scheduler that runs what belongs together on one worker, one after the other; parts begin in the order of collection.

    pytest-xdist's own marks for groups are without effect with this pytest, whose test ids can't be changed any more.
    """

    def __init__(self, config: pytest.Config, log: Any, part_of: Callable[[str], str]) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)
        self._part_of = part_of

    def _split_scope(self, nodeid: str) -> str:
        return self._part_of(nodeid)


def file_of(nodeid: str) -> str:
    """`test_stops` of `tests/cluster/operator/life/test_stops.py::test_a_job`. Tests of a file share what it sets up."""
    return PurePath(nodeid.partition("::")[0]).stem


def longest_first(items: list[pytest.Item], longest: Sequence[str]) -> None:
    """Sort the longest files before all others, so that workers end at about the same time. Nothing goes wrong where the list is out of
    date.
    """
    ranks = {name: rank for rank, name in enumerate(longest)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
