"""Upkeep after a commit: it can't undo the commit, delay the next one or stop the run, and it reports every failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_train.base.runfile import RunConfig
from lockstep_train.checkpoint.format import volume
from lockstep_train.checkpoint.format.manifest import Manifest, decode
from lockstep_train.checkpoint.save.replicas import Replicas
from lockstep_train.checkpoint.save.rotation import Rotation
from lockstep_train.checkpoint.save.upkeep import Exporter, Upkeep, start_upkeep
from support.checkpoint_cases import make_commit, record
from unit.train.model.test_settings import training


@dataclass
class Node:
    """As much of Ranks as copies need."""

    node: int = 0
    nodes: int = 2
    rank: int = 0


def replicas(copies: int) -> Replicas:
    return Replicas(cast(Any, Node()), copies, b"t" * 32, [])


@dataclass
class Exports:
    """Stands for the export: each waits for its turn."""

    done: list[int] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __call__(self, folder: Path, manifest: Manifest, paths: Sequence[Path]) -> None:
        self.begun.release()
        assert self.turns.acquire(timeout=30)
        if manifest.step == 13:
            raise OSError(28, "No space left on device")
        self.done.append(manifest.step)


@pytest.fixture
def exports() -> Iterator[Exports]:
    exports = Exports()
    yield exports
    exports.turns.release(9)


def begin(exporter: Exporter, checkpoints: Path, step: int) -> None:
    folder = make_commit(checkpoints, f"step-{step}.a1")
    exporter.begin(folder, decode((folder / "manifest.json").read_bytes()))


def test_an_export_that_is_behind_leaves_out_what_a_newer_commit_replaces(tmp_path: Path, exports: Exports) -> None:
    told: list[str] = []
    exporter = Exporter(replicas(1), exports, told.append)
    begin(exporter, tmp_path, 1)
    assert exports.begun.acquire(timeout=30)
    begin(exporter, tmp_path, 2)
    begin(exporter, tmp_path, 3)
    exports.turns.release(2)
    exporter.close()
    assert exports.done == [1, 3]
    assert told == ["CHECKPOINT step 2 | its adapter is not exported: a newer commit is there already"]


def test_an_export_that_fails_is_told_and_the_next_one_is_made(tmp_path: Path, exports: Exports) -> None:
    told: list[str] = []
    exporter = Exporter(replicas(1), exports, told.append)
    begin(exporter, tmp_path, 13)
    assert exports.begun.acquire(timeout=30)
    begin(exporter, tmp_path, 14)
    exports.turns.release(2)
    exporter.close()
    assert exports.done == [14]
    assert "CHECKPOINT step 13 | its adapter can't be exported:" in told[0]


def test_a_commit_is_not_rotated_away_while_its_adapter_is_exported(tmp_path: Path, exports: Exports) -> None:
    volume.write_record(tmp_path, record(1))
    exporter = Exporter(replicas(1), exports, print)
    begin(exporter, tmp_path, 1)
    assert exports.begun.acquire(timeout=30)
    for step in (2, 3, 4):
        make_commit(tmp_path, f"step-{step}.a1")
    rotation = Rotation(tmp_path, keep=2)
    assert [str(name) for name in rotation.rotate()] == ["step-2.a1"]
    exports.turns.release()
    exporter.close()
    assert [str(name) for name in rotation.rotate()] == ["step-1.a1"]


def test_a_later_run_with_another_user_may_remove_what_a_killed_export_had_fetched(tmp_path: Path, exports: Exports) -> None:
    exporter = Exporter(replicas(1), exports, print)
    begin(exporter, tmp_path, 1)
    assert exports.begun.acquire(timeout=30)
    (fetched,) = tmp_path.glob(".trash-fetched-*")
    mode = fetched.stat().st_mode
    exports.turns.release()
    exporter.close()
    assert mode & 0o070 == 0o070


def test_an_export_that_never_ends_does_not_keep_the_run_from_ending(tmp_path: Path, exports: Exports) -> None:
    told: list[str] = []
    exporter = Exporter(replicas(1), exports, told.append, patience_seconds=0.01)
    begin(exporter, tmp_path, 1)
    exporter.close()
    assert "is not exported: it takes longer than" in told[0]


@pytest.mark.parametrize(("collective_seconds", "seconds"), [(600, 270), (100, 50)])
def test_the_end_of_a_run_waits_for_an_export_less_long_than_the_other_ranks_wait_for_it(
    tmp_path: Path, collective_seconds: int, seconds: int
) -> None:
    told: list[str] = []
    settings = training(
        checkpoint={"everySteps": 2, "keep": 2, "resumeFrom": "Auto", "exportAdapter": True},
        limits={"collectiveTimeoutSeconds": collective_seconds},
    )
    config, ranks = RunConfig("x", None, tmp_path / "run", settings), cast(Any, SimpleNamespace(first=True))
    upkeep = start_upkeep(config, ranks, 1, ("", 0), tmp_path, lambda *_: None, shared=True, say=told.append)
    assert upkeep._exporter is not None
    waits: list[float] = []
    upkeep._exporter._thread = cast(Any, SimpleNamespace(join=waits.append, is_alive=lambda: True))
    upkeep.close()
    assert waits == [seconds]
    assert f"is not exported: it takes longer than {seconds} s, and the run is over" in told[-1]


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
