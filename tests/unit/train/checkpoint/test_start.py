"""The commit that `resumeFrom` names is where the job starts, and what its restarts go on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.views import refresh_views
from lockstep_train.checkpoint.format.volume import Claim, read_chain, read_view, write_record
from lockstep_train.checkpoint.resume import choose_start, record_start
from support.checkpoint_cases import commits, make_commit, record

Started = tuple[str | None, str | None]
"""The commit's folder, and what the attempt's record says of it."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two commits of another job of this name, and their views."""
    folder = tmp_path / "run"
    for name in ("step-2.a1", "step-4.a1"):
        make_commit(folder / "checkpoints", name)
    write_record(folder / "checkpoints", record(1, given=1, uid="earlier"))
    refresh_views(folder, folder / "checkpoints", commits("step-4.a1", "step-2.a1"))
    return folder


def start(run_dir: Path, resume_from: str, given: int) -> Started:
    """An attempt of a new job up to its first step: then it is killed."""
    checkpoints, claim = run_dir / "checkpoints", Claim(given, "uid")
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    ranks = Ranks(0, 1, 0, 1, 0, 1, torch.device("cpu"), store)
    chosen = choose_start(ranks, checkpoints, resume_from, claim, print)
    record_start(ranks, checkpoints, chosen, claim)
    refresh_views(run_dir, checkpoints, read_chain(checkpoints))
    written = [record for record in read_view(checkpoints).records if record.attempt == chosen.attempt]
    return str(chosen.source.folder) if chosen.source else None, written[0].start


def by_the_view(run_dir: Path) -> Path:
    return run_dir / "checkpoint-2"


def by_a_link_to_the_view(run_dir: Path) -> Path:
    (run_dir / "chosen").symlink_to(run_dir / "checkpoint-2")
    return run_dir / "chosen"


def by_a_view_on_a_volume_without_links(run_dir: Path) -> Path:
    view = run_dir / "checkpoint-2"
    metadata = (view / "metadata.json").read_bytes()
    view.unlink()
    view.mkdir()
    (view / "metadata.json").write_bytes(metadata)
    return view


def by_another_way_to_the_volume(run_dir: Path) -> Path:
    (run_dir.parent / "mount").symlink_to(run_dir)
    return run_dir.parent / "mount/checkpoints/step-2.a1"


@pytest.mark.parametrize("name", [by_the_view, by_a_link_to_the_view, by_a_view_on_a_volume_without_links, by_another_way_to_the_volume])
def test_a_commit_named_in_any_way_is_gone_on_from_when_the_first_attempt_left_none(run_dir: Path, name: Callable[[Path], Path]) -> None:
    resume_from = str(name(run_dir))
    commit = run_dir / "checkpoints/step-2.a1"
    found, recorded = start(run_dir, resume_from, given=1)
    assert found is not None
    assert (Path(found).resolve(), recorded) == (commit, "step-2.a1")
    assert start(run_dir, resume_from, given=2) == (str(commit), "step-2.a1")
    assert start(run_dir, "Auto", given=3) == (str(commit), "step-2.a1")
    assert (run_dir / "checkpoint-2").exists()


def test_a_commit_of_another_run_named_by_its_view_is_recorded_by_its_path(run_dir: Path, tmp_path: Path) -> None:
    commit = str(run_dir / "checkpoints/step-2.a1")
    for given in (1, 2):
        assert start(tmp_path / "other", str(run_dir / "checkpoint-2"), given) == (commit, commit)
