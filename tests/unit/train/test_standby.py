"""A rank of the trainer that waits for its order: what it takes from it."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_train import standby
from lockstep_train.report.reporter import since_boot


def test_an_order_sets_what_is_otherwise_and_takes_away_what_is_gone() -> None:
    environ = {"MASTER_PORT": "29500", "RANK": "1", "LOCKSTEP_STANDBY": "1"}
    standby.apply_order({"MASTER_PORT": "29501", "LOCKSTEP_STANDBY": None, "ABSENT": None, "NEW": "x"}, environ)
    assert environ == {"MASTER_PORT": "29501", "RANK": "1", "NEW": "x"}


def test_a_start_is_counted_from_its_order_though_imports_take_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what else reads standard input finds nothing there, as in a rank that did not wait."""
    order = {"given": time.monotonic() - 60, "environment": {"LOCKSTEP_STANDBY": None}}
    monkeypatch.setenv("LOCKSTEP_STANDBY", "1")
    monkeypatch.setattr(standby, "import_all", lambda config: None)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(order).encode() + b"\n")))
    kept = os.dup(0)
    try:
        config: Any = None
        began = standby.wait_for_order(config)
        assert Path("/proc/self/fd/0").readlink() == Path(os.devnull)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert since_boot() - began == pytest.approx(60, abs=30)
    assert not standby.is_standby()
