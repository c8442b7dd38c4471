"""The power may go at any moment of a save: what a start finds is the old commit or the new one. Root: it mounts a disk in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
VARIANTS = ("alone", "a neighbor syncs")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What cut_lockstep.py found, by what was saved."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": f"{TESTS.parent / 'workspace'}:{TESTS}:{TESTS / 'train' / 'ranks'}",
    }
    command = [sys.executable, str(TESTS / "faults/cut_lockstep.py"), str(tmp_path_factory.mktemp("power"))]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    if ended.returncode:
        pytest.fail(ended.stderr.strip(), pytrace=False)
    return {result["name"]: result for result in json.loads(ended.stdout)["results"]}


def test_a_power_loss_at_any_call_of_a_save_leaves_the_old_commit_or_the_new_one(findings: dict[str, dict[str, Any]]) -> None:
    found = findings["a save"]
    assert found["notes"] == []
    for variant in VARIANTS:
        assert set(found["verdicts"][variant]) == {"old", "new"}
        assert sum(found["verdicts"][variant].values()) >= 20, "a save of two ranks and a rotation has more calls than that"


def test_a_power_loss_at_any_call_of_a_restart_leaves_the_commit_it_started_from(findings: dict[str, dict[str, Any]]) -> None:
    found = findings["a restart"]
    for variant in VARIANTS:
        assert set(found["verdicts"][variant]) == {"old"}
        assert found["verdicts"][variant]["old"] >= 6


def test_after_a_power_loss_of_two_nodes_either_volume_alone_has_the_old_commit_or_the_new_one(findings: dict[str, dict[str, Any]]) -> None:
    found = findings["a save on two volumes"]
    assert found["notes"] == []
    assert set(found["verdicts"]["a neighbor syncs"]) == {"old", "new"}
