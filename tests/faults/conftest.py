"""What needs a control plane shares that of its worker, one after the other, beside the power cuts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.clusters.control_plane import Plane, control_plane
from support.side_by_side import Parts, file_of, longest_first

LONGEST = ("test_power_loss", "test_rights", "test_hostile_objects", "test_accounts", "test_dashboard")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Parts:
    return Parts(
        config, log, lambda nodeid: nodeid if file_of(nodeid) in ("test_operator_faults", "test_two_machines") else file_of(nodeid)
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items, LONGEST)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    with control_plane(tmp_path_factory.mktemp("plane"), list) as kubeconfig:
        yield Plane(kubeconfig)
