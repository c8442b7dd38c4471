"""Who reads which shard before a start: each once where all nodes see one volume, and never none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint import resume
from lockstep_train.checkpoint.format.layout import shard_file
from lockstep_train.checkpoint.format.manifest import ShardRecord
from lockstep_train.checkpoint.format.volume import Claim, shard_problem, size_problem, write_record
from lockstep_train.checkpoint.resume import _verdict_of_all, choose_start
from support.checkpoint_cases import make_commit, record

SHARDS = [shard_file(rank, 4) for rank in range(4)]
Problem = Callable[[Path, ShardRecord], str | None]


class Nodes:
    """Two nodes with two ranks each, in threads, which start from one folder."""

    def __init__(self, checkpoints: Path) -> None:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.checkpoints = checkpoints
        self.ranks = [Ranks(rank, 4, rank % 2, 2, rank // 2, 2, torch.device("cpu"), store) for rank in range(4)]
        self.said: list[str] = []

    def start(self, resume_from: str = "Auto", *, shared: bool) -> list[Any]:
        def choose(ranks: Any) -> Any:
            say = self.said.append if ranks.first else lambda line: None
            return choose_start(ranks, self.checkpoints, resume_from, Claim(None, None), say, shared=shared)

        with ThreadPoolExecutor(4) as threads:
            return [start.source for start in threads.map(choose, self.ranks)]


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    for name in ("step-2.a1", "step-4.a1"):
        make_commit(tmp_path / "checkpoints", name, ranks=4)
    write_record(tmp_path / "checkpoints", record(1))
    return Nodes(tmp_path / "checkpoints")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose bytes are read, each time."""
    found: list[str] = []

    def reading(folder: Path, shard: ShardRecord) -> str | None:
        found.append(shard.file)
        return shard_problem(folder, shard)

    monkeypatch.setattr("lockstep_train.checkpoint.resume.shard_problem", reading)
    return found


def test_of_one_volume_each_shard_is_read_by_one_rank_and_every_node_has_it(nodes: Nodes, read: list[str]) -> None:
    sources = nodes.start(shared=True)
    assert sorted(read) == SHARDS
    assert {source.folder.name for source in sources} == {"step-4.a1"}
    assert [(source.everywhere, source.holders) for source in sources] == [(True, [[0, 2], [1, 3], [0, 2], [1, 3]])] * 4


def test_of_volumes_of_their_own_and_of_a_folder_elsewhere_each_node_reads_all(nodes: Nodes, read: list[str], tmp_path: Path) -> None:
    nodes.start(shared=False)
    assert sorted(read) == sorted(SHARDS * 2)
    read.clear()
    elsewhere = Nodes(tmp_path / "other/checkpoints")
    elsewhere.start(str(nodes.checkpoints / "step-2.a1"), shared=True)
    assert sorted(read) == sorted(SHARDS * 2)


@pytest.mark.parametrize("shard", range(4))
def test_a_damaged_shard_of_one_volume_is_never_used_whoever_reads_it(nodes: Nodes, shard: int) -> None:
    path = nodes.checkpoints / "step-4.a1" / SHARDS[shard]
    path.write_bytes(path.read_bytes()[::-1])
    assert {source.folder.name for source in nodes.start(shared=True)} == {"step-2.a1"}
    assert nodes.said[0].startswith("step-4.a1 can't be used (")
    assert f"{SHARDS[shard]} is damaged" in nodes.said[0]


def test_what_one_node_fails_to_read_another_gives(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mount has an error, or has not seen the file yet."""
    names = threading.local()

    def failing(real: Problem) -> Problem:
        return lambda folder, shard: (
            f"{shard.file} can't be read: Input/output error" if names.node == 1 and shard.file == SHARDS[3] else real(folder, shard)
        )

    verified = resume._verified

    def on_its_node(ranks: Any, *arguments: Any, **options: Any) -> Any:
        names.node = ranks.node
        return verified(ranks, *arguments, **options)

    monkeypatch.setattr(resume, "_verified", on_its_node)
    monkeypatch.setattr(resume, "shard_problem", failing(shard_problem))
    monkeypatch.setattr(resume, "size_problem", failing(size_problem))
    sources = nodes.start(shared=True)
    assert {source.folder.name for source in sources} == {"step-4.a1"}
    assert (sources[0].everywhere, sources[0].holders[3]) == (False, [1])


def test_a_shard_that_no_rank_has_read_is_a_problem() -> None:
    answers = [{"node": node, "shards": {"0": None, "1": None}, "read": {"0": None} if node == 0 else {}} for node in range(2)]
    assert _verdict_of_all(answers, 2)["problem"] == "nobody has read shard 1"
