"""The operator's fault tests run beside each other, each worker with a control plane of its own, and beside the power cuts."""

from __future__ import annotations

from typing import Any

import pytest

from support.side_by_side import Parts, file_of


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Parts:
    return Parts(config, log, lambda nodeid: "power" if file_of(nodeid) == "test_power_loss" else nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem != "test_power_loss")
