"""What all tests share: modules in this folder can be imported, and nothing of the person who runs them is used or changed.

No test sees that person's kubeconfig, embedded cluster or checkout state. Tests that need a cluster bring up one of their own (tests/cluster).
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lockstep.cli.paths import STATE
from lockstep.devcluster.layout import NUMBER
from own_cluster import GIVEN, NOBODYS

_STATE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STATE] = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
    os.environ[STATE] = config.stash[_STATE].name
    os.environ.pop("KUBECONFIG", None)
    if GIVEN not in os.environ:
        os.environ[NUMBER] = str(NOBODYS)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_STATE].cleanup()
