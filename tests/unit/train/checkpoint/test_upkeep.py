"""Upkeep after a commit: it can't undo the commit, delay the next one or stop the run, and it reports every failure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep_train.checkpoint.format import volume
from lockstep_train.checkpoint.save.replicas import Replicas
from lockstep_train.checkpoint.save.upkeep import Upkeep
from support.checkpoint_cases import make_commit, record


@dataclass
class Node:
    """As much of Ranks as copies need."""

    node: int = 0
    nodes: int = 2
    rank: int = 0


def replicas(copies: int) -> Replicas:
    return Replicas(cast(Any, Node()), copies, [])


def test_a_shard_with_fewer_copies_than_asked_for_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    volume.write_record(tmp_path / "checkpoints", record(1))
    Upkeep(tmp_path / "checkpoints", 2, replicas(2), told.append).committed(make_commit(tmp_path / "checkpoints", "step-1.a1"))
    assert len(told) == 1
    assert "shard-r00000-of-00001.safetensors" in told[0]
    assert "has only one copy" in told[0]


def test_an_attempt_that_was_replaced_hears_that_its_commits_do_not_count(tmp_path: Path) -> None:
    told: list[str] = []
    volume.write_record(tmp_path / "checkpoints", record(1))
    volume.write_record(tmp_path / "checkpoints", record(2))
    Upkeep(tmp_path / "checkpoints", 2, replicas(1), told.append).committed(make_commit(tmp_path / "checkpoints", "step-1.a1"))
    assert len(told) == 1
    assert "attempt 2 has started" in told[0]


def test_a_save_that_came_to_no_commit_changes_nothing(tmp_path: Path) -> None:
    folder = make_commit(tmp_path / "checkpoints", "step-1.a1")
    (folder / "manifest.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    Upkeep(tmp_path / "checkpoints", 2, replicas(2), pytest.fail).committed(folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_volume_that_cannot_be_written_costs_views_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    told: list[str] = []
    volume.write_record(tmp_path / "checkpoints", record(1))
    folder = make_commit(tmp_path / "checkpoints", "step-1.a1")
    monkeypatch.setattr("lockstep_train.checkpoint.format.views.write_durably", full)
    Upkeep(tmp_path / "checkpoints", 2, replicas(1), told.append).committed(folder)
    assert "the checkpoint-N views can't be kept" in told[0]
