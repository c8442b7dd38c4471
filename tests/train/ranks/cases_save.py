"""Rank functions of the tests that look into a save."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases_modes import manifest_of
from rank_cases import CountCollectives, assembled
from safetensors.torch import load_file

from lockstep_spec import files
from lockstep_train import __main__ as trainer
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.runfile import rank_environment
from lockstep_train.checkpoint.format.manifest import decode
from lockstep_train.checkpoint.format.volume import Record, write_record
from lockstep_train.checkpoint.save import commit, save, snapshot
from lockstep_train.checkpoint.save.replicas import local_only
from lockstep_train.checkpoint.save.upkeep import Upkeep
from lockstep_train.engine import step as engine_step
from lockstep_train.steps import Steps
from lockstep_train.watch.watchdog import StopSignal
from lockstep_train.zero import zero_access
from lockstep_train.zero.kinds import FULL


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
        snapshot.write_pages_durably = dies(files.write_pages_durably, step, rank)
    else:
        commit.write_durably = dies(files.write_durably, step, rank)
    return trainer.main([])


def fail_writing(steps: list[int], rank: int) -> int:
    """Train with a disk that is full on one rank at some steps."""
    whole = save.write_shard

    def full(folder: Path, *arguments: Any) -> Any:
        if folder.name.startswith(tuple(f"step-{step}." for step in steps)) and os.environ["RANK"] == str(rank):
            raise OSError(28, "No space left on device")
        return whole(folder, *arguments)

    save.write_shard = full
    return trainer.main([])


def copy_beside_a_step() -> None:
    """Hold the copy back until the next update is about to begin: what is written is the state of the save's step all the same."""
    run = assembled()
    train_a_step(run, 1)
    before = {item.name: item.tensors["fp32"].to("cpu", copy=True) for item in zero_access.fragments(run.engine)}
    near_update, updated = threading.Event(), threading.Event()
    copy, wait, update = snapshot.Snapshot.copy, run.saver.before_update, run.engine.step

    def late(self: snapshot.Snapshot) -> None:
        near_update.wait()
        updated.wait(0.5)  # an update that does not wait for the copy is done by then; one that does waits for this
        copy(self)

    def updating() -> None:
        update()
        if near_update.is_set():
            updated.set()

    def waiting() -> None:
        near_update.set()
        wait()

    snapshot.Snapshot.copy, run.saver.before_update, run.engine.step = late, waiting, updating
    saving = run.saver.start(run.engine, 1, wait=True)
    train_a_step(run, 2)
    saved = saving.result()
    assert saved.committed, saved.problem
    manifest = decode((saved.folder / "manifest.json").read_bytes())
    assert manifest.optimizer_step == 1, "the manifest tells of the update after the save"
    record = manifest.shards[run.ranks.rank]
    values, offset = load_file(saved.folder / record.file)["fp32"], 0
    for item in record.fragments:
        assert torch.equal(values[offset : offset + item.numel], before[item.name]), item.name
        offset += item.numel
    now = {item.name: item.tensors["fp32"].cpu() for item in zero_access.fragments(run.engine)}
    assert not any(torch.equal(now[name], value) for name, value in before.items() if value.numel()), "no update came after the save"
    engine_ranks.leave()


def train_a_step(run: Any, step: int) -> None:
    Steps(run, StopSignal()).take(step)


def save_while_others_are_stopped() -> None:
    """Rank 1's shard is durable while no other process of the gang runs at all: not even the store's server."""
    run = assembled()
    train_a_step(run, 1)
    run.ranks.store.set(f"pid/{run.ranks.rank}", str(os.getpid()))
    others = [int(run.ranks.store.get(f"pid/{rank}")) for rank in range(run.ranks.world_size) if rank != run.ranks.rank]
    dist.barrier()
    if run.ranks.rank == 1:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        run.saver.start(run.engine, 1, wait=True)
        run.saver.before_update()
        shard = run.saver._checkpoints / "step-1.a1" / "shard-r00001-of-00003.safetensors"
        while not shard.exists():
            time.sleep(0.005)
        states = {Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in others}
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        assert states == {"T"}, states
        assert load_file(shard).keys() == set(FULL)
    else:
        run.ranks.store.get("go")  # waits for rank 1
        run.saver.start(run.engine, 1, wait=True)
    if run.ranks.rank == 1:
        run.ranks.store.set("go", "1")
    run.saver.finish()
    dist.barrier()
    assert (run.saver._checkpoints / "step-1.a1" / "manifest.json").exists()
    engine_ranks.leave()


def wait_beside_the_training() -> None:
    """A thread that waits for a key over a connection of its own leaves the training's connection free."""
    ranks = engine_ranks.join(rank_environment())
    own = ranks.store.clone()
    began = threading.Event()

    def wait() -> None:
        began.set()
        own.get("late")

    thread = threading.Thread(target=wait)
    thread.start()
    began.wait()
    for number in range(200):
        ranks.store.set(f"key/{number}", "1")
        assert ranks.store.get(f"key/{number}") == b"1"
    ranks.store.set("late", "1")
    thread.join()
    engine_ranks.leave()


def slow_volume(rank: int, step: int, until: int) -> int:
    """Train with a volume that on `rank` takes from the save of `step` until step `until` is computed."""
    reached = threading.Event()
    seed, whole = engine_step.seed_micro_batch, save.write_shard

    def seeded(number: int, at: int, micro: int, on: int) -> None:
        if at >= until:
            reached.set()
        seed(number, at, micro, on)

    def slow(folder: Path, *arguments: Any) -> Any:
        if folder.name.startswith(f"step-{step}.") and os.environ["RANK"] == str(rank):
            reached.wait()
        return whole(folder, *arguments)

    engine_step.seed_micro_batch, save.write_shard = seeded, slow
    return trainer.main([])


def fail_unexpectedly(step: int, rank: int) -> int:
    """Train with a defect in the background thread."""
    whole = save.write_shard

    def broken(folder: Path, *arguments: Any) -> Any:
        if folder.name.startswith(f"step-{step}.") and os.environ["RANK"] == str(rank):
            raise RuntimeError("a defect of the writer")
        return whole(folder, *arguments)

    save.write_shard = broken
    return trainer.main([])


class Values:
    """A state without an engine: the step's number, all over."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = 0

    def image(self, engine: Any) -> snapshot.FileImage:
        tensors = {kind: torch.full((1000,), float(self.step)) for kind in FULL}
        return snapshot.lay_out([zero_access.Fragment("weight", (2000,), 1000 * self.rank, 1000, tensors)])


def saver_of_values(ranks: engine_ranks.Ranks, checkpoints: Path) -> tuple[save.Saver, Values]:
    values = Values(ranks.rank)
    if ranks.first:
        write_record(checkpoints, Record(1))
    upkeep = Upkeep(checkpoints, 2, local_only(ranks), print, mine=ranks.first)
    saver = save.Saver(ranks, checkpoints, 1, upkeep, lambda step: dataclasses.replace(manifest_of(ranks.world_size, "Full"), step=step))
    saver._source = values  # type: ignore[assignment]
    return saver, values


def fail_and_save_again(folder: str) -> None:
    """Rank 1 can't write step 1, is late with step 2, and both ranks then commit step 3. Looked at between the saves."""
    ranks = engine_ranks.join(rank_environment())
    checkpoints, whole, decide = Path(folder), save.write_shard, commit.decide
    saver, _ = saver_of_values(ranks, checkpoints)

    def hindered(to: Path, *arguments: Any) -> Any:
        if to.name == "step-1.a1" and ranks.rank == 1:
            raise OSError(28, "No space left on device")
        if to.name == "step-2.a1" and ranks.rank == 1:
            ranks.store.get("go on")
        return whole(to, *arguments)

    def impatient(*arguments: Any) -> commit.Decision:
        return decide(*arguments, timedelta(seconds=1) if arguments[1].endswith("step-2.a1") else commit.DEADLINE)

    def found() -> list[str]:
        return sorted(path.name for path in checkpoints.iterdir() if path.name != "chain")

    save.write_shard, commit.decide = hindered, impatient
    if ranks.first:
        (checkpoints / "step-1.a2").mkdir()
    assert not saver.save(None, 1).committed
    dist.barrier()
    assert found() == ["step-1.a2"], "the shard of the failed save is there, or another attempt's is not"
    dist.barrier()  # both have looked
    late = saver.start(None, 2, wait=True)
    if ranks.first:
        assert not late.result().committed
        assert found() == ["step-1.a2", "step-2.a1"], "a rank still writes to step 2"
        ranks.store.set("go on", "1")
    assert not late.result().committed
    assert saver.save(None, 3).committed
    dist.barrier()
    assert found() == ["step-1.a2", "step-3.a1"]
    engine_ranks.leave()


def die_saving(folder: str, point: str, rank: int) -> None:
    """Commit step 2; be killed at `point` of the save of step 4 on `rank`."""
    ranks = engine_ranks.join(rank_environment())
    saver, values = saver_of_values(ranks, Path(folder))
    for step in (1, 2, 4):
        values.step = step
        if step == 4 and ranks.rank == rank:
            kill_at(point, saver)
        assert saver.save(None, step).committed
    raise AssertionError(f"{point} was never reached")


def kill_at(point: str, saver: save.Saver) -> None:
    places: dict[str, tuple[Any, str]] = {
        "before the shard": (save, "write_shard"),
        "after the shard": (commit, "acknowledge"),
        "before the manifest": (commit, "write_durably"),
        "after the manifest": (commit, "await_outcome"),
        "before rotation": (saver.upkeep, "committed"),
    }
    if point == "in the shard":
        snapshot.write_pages_durably = dies(files.write_pages_durably, 4, saver._ranks.rank)
    elif point == "in the manifest":
        commit.write_durably = dies(files.write_durably, 4, saver._ranks.rank)
    else:
        setattr(*places[point], kill_here)
