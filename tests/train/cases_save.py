"""Rank functions of the tests that look into a save."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_cases import CountCollectives, assembled

from lockstep_train import __main__ as trainer
from lockstep_train.checkpoint import commit, durable, save
from lockstep_train.engine import ranks as engine_ranks
from lockstep_train.steps import Steps
from lockstep_train.stop import StopSignal


def count_collectives_of_a_save() -> None:
    run = assembled()
    with CountCollectives() as stepping:
        Steps(run, StopSignal()).take(1)
    assert any("allgather" in name or "all_gather" in name for name in stepping.seen), stepping.seen
    starting, beside = CountCollectives(), CountCollectives()
    background = run.saver._save

    def watched(job: save.Job) -> save.Saved:
        with beside:  # a mode is its thread's own
            return background(job)

    run.saver._save = watched
    with starting:
        saved = run.saver.save(run.engine, 1)
    assert saved.committed, saved.problem
    assert (starting.seen, beside.seen) == ([], [])
    engine_ranks.leave()


def kill_here(*arguments: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_of(path: Path, content: Any) -> None:
    """What is on the disk when a rank dies in the middle of a file."""
    with path.with_name(f".{path.name}.torn.tmp").open("wb") as torn:
        torn.write(content[: len(content) // 2])
        torn.flush()
        os.fsync(torn.fileno())


def dies(whole: Callable[..., Any], step: int, rank: int) -> Callable[..., Any]:
    """`whole`, a function that writes a file of a commit, but on `rank` the one of `step` only by half."""

    def write(path: Path, content: Any, *arguments: Any) -> None:
        if path.parent.name.startswith(f"step-{step}.") and os.environ["RANK"] == str(rank):
            half_of(path, content)
            kill_here()
        whole(path, content, *arguments)

    return write


def die_writing(file: str, step: int, rank: int) -> int:
    """Train, and be killed with half of `file` (the shard or the manifest) of `step` written on `rank`."""
    if file == "shard":
        from lockstep_train.checkpoint import write

        write.write_pages_durably = dies(durable.write_pages_durably, step, rank)
    else:
        commit.write_durably = dies(durable.write_durably, step, rank)
    return trainer.main([])


def fail_writing(step: int, rank: int) -> int:
    """Train with a disk that is full on one rank at one step."""
    whole = save.write_shard

    def full(folder: Path, *arguments: Any) -> Any:
        if folder.name.startswith(f"step-{step}.") and os.environ["RANK"] == str(rank):
            raise OSError(28, "No space left on device")
        return whole(folder, *arguments)

    save.write_shard = full
    return trainer.main([])
