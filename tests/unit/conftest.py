"""Order of the unit tests: files that wait for processes begin first, so that both workers end at about the same time."""

from __future__ import annotations

from typing import Any

import pytest

from support.side_by_side import Parts, file_of, longest_first
from unit.virtual_time import VirtualClock

LONGEST = (
    "test_two_terminals",
    "test_agents",
    "test_interactive_agents",
    "test_reporter",
    "test_every_verb",
    "test_host",
    "test_stacks",
    "test_fetch",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items, LONGEST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Parts:
    """Keep a file on one worker, but for the one whose tests have launches of their own."""
    return Parts(config, log, lambda nodeid: nodeid if file_of(nodeid) == "test_two_terminals" else nodeid.partition("::")[0])


@pytest.fixture
def clock() -> VirtualClock:
    """A clock in whose event loop the test runs, if it is a coroutine."""
    return VirtualClock()
