"""What Lockstep's trainer saves, put through power cuts: real engines, real savers, a state that tells its version bit by bit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from faults.power_cut import Subject
from lockstep_gang.contract.run import JobIdentity, Run
from lockstep_gang.coordinator.owner import DEAD_SECONDS, Ownership
from lockstep_machine.network import free_ports
from lockstep_train import inspect
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.store import SignedStore
from lockstep_train.checkpoint.commits import collect, newest_whole
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.format.shards import ShardReader
from lockstep_train.checkpoint.format.volume import Claim
from lockstep_train.checkpoint.resume import choose_start, record_start
from lockstep_train.checkpoint.save.replicas import connect, local_only
from lockstep_train.checkpoint.save.save import Saver
from lockstep_train.checkpoint.save.upkeep import Upkeep
from lockstep_train.zero import zero_access
from unit.gang.cases import make_run

OLD, NEW = 4, 6
"""Steps of the two newest commits; one of step 2 is there too, and rotated away by the save of step 6."""
KEPT = "commits"
CLAIM = Claim(None, None)


def lone(store: Any = None) -> Ranks:
    return Ranks(0, 1, 0, 1, 0, 1, torch.device("cpu"), store or dist.HashStore())  # type: ignore[attr-defined]


def value(name: str, kind: str, numel: int, step: int) -> torch.Tensor:
    """What a parameter, whole and flattened, holds at a step."""
    return torch.rand(numel, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {kind} {step}".encode())))


def judge_commits(disk: Path) -> str:
    """What a start would go on from, read whole."""
    said: list[str] = []
    try:
        start = choose_start(lone(), disk / "run/checkpoints", "Auto", CLAIM, said.append)
    except Exception as error:
        return f"nothing: {error}"
    if start.source is None:
        return "nothing"
    manifest = start.source.manifest
    wrong = wrong_values(manifest, ShardReader(start.source.folder, manifest))
    if wrong is not None:
        return wrong
    if said:
        return f"unloadable: {said}"
    wrong = wrong_beside(disk / "run")
    if wrong is not None:
        return wrong
    return {OLD: "old", NEW: "new"}.get(manifest.step, f"step {manifest.step}")


def wrong_values(manifest: Manifest, reader: ShardReader) -> str | None:
    """The first parameter that is not, bit by bit, what it was at the commit's step."""
    for name in reader.shapes:
        for kind in zero_access.KINDS:
            expected = value(name, kind, reader.numel(name), manifest.step)
            if not torch.equal(reader.read(name, kind).view(torch.int32), expected.view(torch.int32)):
                return f"mix: {name} {kind} is not that of step {manifest.step}"
    return None


def judge_volumes(disk: Path) -> str:
    """What both volumes together hold, and each of them where the other is lost."""
    volumes = [disk / f"volume-{rank}" for rank in range(2)]
    found = []
    for paths in ([volumes[0]], [volumes[1]], volumes):
        try:
            _, manifest, shards = newest_whole(paths, "start from")
        except ConfigError as error:
            return f"nothing: on {len(paths)} volumes: {error}"
        wrong = wrong_values(manifest, ShardReader(shards[0].parent, manifest, shards))
        if wrong is not None or manifest.step not in {OLD, NEW}:
            return wrong or f"mix: step {manifest.step}"
        found.append(manifest.step)
    return "new" if found[-1] == NEW else "old"


def wrong_beside(run: Path) -> str | None:
    """What a view shows that isn't so."""
    for view in run.glob("checkpoint-*"):
        if view.exists() and any(
            inspect.verify_commits([commit])["commits"][0]["problems"] for commit in collect([view.resolve()]).chain()
        ):
            return f"mix: {view.name} shows a commit that isn't whole"
    return None


class CommitSession:
    """A rank with a real engine, whose state is set before each save."""

    def __init__(self, rank: int, folder: Path, run_file: Path, ranks: int) -> None:
        self._keep_in = run_file.parent
        os.environ.update(rank_variables(rank, ranks, rendezvous_port(rank, folder)))
        os.environ["LOCKSTEP_RUN"] = str(run_file)
        import rank_cases

        self._run = rank_cases.assembled()
        zero_access.create_optimizer_state(self._run.engine, 0)
        self._saves = 0

    def save_old(self, disk: Path) -> None:
        checkpoints, ranks = disk / "run/checkpoints", self._apart("start")
        record_start(ranks, checkpoints, choose_start(ranks, checkpoints, "Auto", CLAIM, print), CLAIM)
        for step in (2, OLD):
            self._save(disk, step)
        if self._run.ranks.first:
            shutil.copytree(disk / "run/checkpoints", self._keep_in / KEPT)

    def save_new(self, disk: Path) -> None:
        self._save(disk, NEW)

    @torch.no_grad()
    def _save(self, disk: Path, step: int) -> None:
        self._saves += 1
        for fragment in zero_access.fragments(self._run.engine):
            numel = torch.Size(fragment.shape).numel()
            for kind, tensor in fragment.tensors.items():
                tensor.copy_(value(fragment.name, kind, numel, step)[fragment.start : fragment.start + fragment.numel])
        ranks, checkpoints = self._apart(f"save-{self._saves}"), self._checkpoints(disk)
        upkeep = self._upkeep(checkpoints, ranks)
        saved = Saver(ranks, checkpoints, 1, upkeep, self._run.describe).save(self._run.engine, step)
        assert saved.committed, saved.problem

    def _checkpoints(self, disk: Path) -> Path:
        return disk / "run/checkpoints"

    def _upkeep(self, checkpoints: Path, ranks: Ranks) -> Upkeep:
        return Upkeep(checkpoints, 2, local_only(ranks), print, mine=ranks.first_of_node)

    def _apart(self, what: str) -> Ranks:
        """The ranks with keys of their own, since some are used once."""
        store = SignedStore(self._run.ranks.store._store, what.encode(), timedelta(minutes=10))  # type: ignore[attr-defined]
        return dataclasses.replace(self._run.ranks, store=store)


class VolumesSession(CommitSession):
    """A rank of two nodes with a volume each, which keep each other's shards."""

    def save_old(self, disk: Path) -> None:
        checkpoints, ranks = self._checkpoints(disk), self._apart("start")
        record_start(ranks, checkpoints, choose_start(ranks, checkpoints, "Auto", CLAIM, print), CLAIM)
        for step in (2, OLD):
            self._save(disk, step)

    def _checkpoints(self, disk: Path) -> Path:
        return disk / f"volume-{self._run.ranks.rank}/checkpoints"

    def _upkeep(self, checkpoints: Path, ranks: Ranks) -> Upkeep:
        replicas = connect(ranks, checkpoints, 1, 2, ("127.0.0.1", int(os.environ["MASTER_PORT"])))
        return Upkeep(checkpoints, 2, replicas, print, mine=True)

    def _apart(self, what: str) -> Ranks:
        ranks = super()._apart(what)
        return dataclasses.replace(ranks, local_rank=0, local_world_size=1, node=ranks.rank, nodes=2)


class StartSession:
    """The first rank of a restart: it sweeps what a killed save left, and records which commit its attempt starts from."""

    def __init__(self, commits: Path) -> None:
        self._commits = commits

    def save_old(self, disk: Path) -> None:
        shutil.copytree(self._commits, disk / "run/checkpoints")
        torn = disk / "run/checkpoints/step-5.a1"
        torn.mkdir()
        (torn / ".shard.tmp").write_bytes(b"half")
        os.sync()

    def save_new(self, disk: Path) -> None:
        checkpoints = disk / "run/checkpoints"
        assert Ownership(_owning(disk, "this")).take() is None
        record_start(lone(), checkpoints, choose_start(lone(), checkpoints, "Auto", CLAIM, print), CLAIM)


def _owning(disk: Path, uid: str) -> Run:
    return make_run(job=JobIdentity("power", "test", uid), run_dir=str(disk / "run"))


def judge_start(disk: Path) -> str:
    """What a start would go on from; nothing if its folder would stay another job's for longer than a minute."""
    now = 0.0
    other = Ownership(_owning(disk, "another"), lambda: now)
    other.take()
    now = DEAD_SECONDS
    return judge_commits(disk) if other.take() is None else "nothing: its folder is locked"


def starts(folder: Path) -> Subject:
    """A restart over the commits that an earlier subject left in `folder`."""
    return Subject("a restart", lambda rank, apart: StartSession(folder / KEPT), judge_start, ranks=1, replaces=False, survives=True)


def commits(model: Path, data: Path, folder: Path, stage: str) -> Subject:
    """Two ranks save a third commit, which rotates the first away."""
    run_file = _run_file(model, data, folder, stage)
    return Subject("a save", lambda rank, apart: CommitSession(rank, apart, run_file, 2), judge_commits, survives=True)


def volumes(model: Path, data: Path, folder: Path) -> Subject:
    """Two nodes with a volume each save a third commit, and lose power together."""
    run_file = _run_file(model, data, folder, "Stage3")
    start = lambda rank, apart: VolumesSession(rank, apart, run_file, 2)  # noqa: E731
    # One variant, for the time it takes: the harder one.
    return Subject("a save on two volumes", start, judge_volumes, survives=True, variants=("a neighbor syncs",))


def _run_file(model: Path, data: Path, folder: Path, stage: str) -> Path:
    training = {
        "model": {"name": str(model)},
        "lora": {"rank": 3, "alpha": 6, "dropout": "0", "targetModules": ["q_proj", "down_proj"]},
        "zeroStage": stage,
        "precision": "FP32",
        "seed": 1,
        "data": {"path": str(data), "maxLength": 32},
        "optimization": {"epochs": 1, "maxSteps": 6, "learningRate": "1e-3", "microBatchSize": 1},
        "evaluation": None,
        "checkpoint": {"everySteps": 2, "keep": 2, "resumeFrom": "Auto"},
    }
    document = {
        "format": "lockstep-run/1",
        "job": {"name": "power", "namespace": "test", "uid": None},
        "runDir": str(folder / "elsewhere"),
        "training": training,
    }
    path = folder / f"{stage}.json"
    path.write_text(json.dumps(document))
    return path


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def rendezvous_port(rank: int, folder: Path) -> int:
    """A free one that rank 0 finds, through the folder that all ranks see."""
    path = folder / "port"
    if rank == 0:
        port = int(free_ports(1)[0])
        path.with_suffix(".new").write_text(str(port))
        path.with_suffix(".new").rename(path)
        return port
    while not path.exists():
        time.sleep(0.01)
    return int(path.read_text())
