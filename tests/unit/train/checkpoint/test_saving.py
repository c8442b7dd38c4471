"""Reports of a save, and how ranks agree on its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep_gang.contract.messages import SaveFailed, rank_report_from_json
from lockstep_spec.choices import Batches
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import RunConfig
from lockstep_train.checkpoint.format.manifest import ShardRecord, decode, encode
from lockstep_train.checkpoint.format.volume import VolumeView
from lockstep_train.checkpoint.resume import Start
from lockstep_train.checkpoint.save import commit
from lockstep_train.checkpoint.save.commit import Decision
from lockstep_train.checkpoint.save.save import Leftovers, Saved
from lockstep_train.report import Reporter
from lockstep_train.run import Description, SaveReport, changed_settings, manifest_template, optimizer_settings
from support.checkpoint_cases import IDENTITY, manifest
from unit.train.model.test_settings import training

SHARDS = [ShardRecord(f"shard-r0000{rank}-of-00002.safetensors", 8, "0", ()) for rank in range(2)]


def two_ranks(nodes: int) -> Any:
    return Ranks(0, 2, 0, 2 // nodes, 0, nodes, torch.device("cpu"), dist.HashStore())  # type: ignore[attr-defined]


def names(shards: Sequence[ShardRecord]) -> bytes:
    return json.dumps([shard.file for shard in shards]).encode()


def test_the_manifest_is_written_on_each_node_when_every_rank_has_its_shard(tmp_path: Path) -> None:
    first = two_ranks(nodes=2)
    second = replace(first, rank=1, node=1)
    for ranks, shard in ((second, SHARDS[1]), (first, SHARDS[0])):
        commit.acknowledge(ranks, "tag", shard, None)
    decision = commit.decide(first, "tag", names)
    for ranks, given in ((first, decision), (second, commit.await_decision(second, "tag"))):
        (tmp_path / str(ranks.node)).mkdir()
        assert commit.write_manifest(ranks, "tag", tmp_path / str(ranks.node), given).committed
        written = (tmp_path / str(ranks.node) / "manifest.json").read_text()
        assert json.loads(written) == [shard.file for shard in SHARDS]
    assert commit.await_outcome(first, "tag", commit.Outcome(committed=True)).committed


def test_a_node_that_cannot_write_the_manifest_is_named_to_all(tmp_path: Path) -> None:
    first = two_ranks(nodes=2)
    second = replace(first, rank=1, node=1)
    for ranks, shard in ((second, SHARDS[1]), (first, SHARDS[0])):
        commit.acknowledge(ranks, "tag", shard, None)
    here = commit.write_manifest(first, "tag", tmp_path, commit.decide(first, "tag", names))
    commit.write_manifest(second, "tag", tmp_path / "gone", commit.await_decision(second, "tag"))
    ended = commit.await_outcome(first, "tag", here)
    assert not ended.committed
    assert ended.problem.startswith("node 1: the manifest can't be written: ")


def test_a_rank_that_gives_no_shard_in_time_is_named_and_there_is_no_commit(tmp_path: Path) -> None:
    ranks = two_ranks(nodes=1)
    commit.acknowledge(ranks, "tag", SHARDS[0], None)
    decision = commit.decide(ranks, "tag", names, timedelta(milliseconds=20))
    assert decision == commit.Decision(problem="rank 1: no shard within 0 s, or its word was deleted from rank 0's store", answered=False)
    assert commit.write_manifest(ranks, "tag", tmp_path, decision) == commit.Outcome(committed=False, problem=decision.problem)
    assert list(tmp_path.iterdir()) == []


def test_of_many_ranks_without_a_shard_three_are_named_with_their_problems() -> None:
    first = replace(two_ranks(nodes=1), world_size=6)
    for rank in range(6):
        commit.acknowledge(replace(first, rank=rank), "tag", None, "full")
    problems = "; ".join(f"rank {rank} on node 0: full" for rank in range(3))
    assert commit.decide(first, "tag", names).problem == f"{problems}; and 3 more"


def shards_of(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / SHARDS[0].file).write_bytes(b"shard")
    return folder


def test_shards_that_came_to_no_commit_go_once_every_rank_has_answered(tmp_path: Path) -> None:
    """And never before: a rank that is late still writes there."""
    leftovers = Leftovers(two_ranks(nodes=1))
    late, refused = shards_of(tmp_path / "step-1.a1"), shards_of(tmp_path / "step-2.a1")
    under_way, other = shards_of(tmp_path / "step-3.a1"), shards_of(tmp_path / "step-1.a2")
    leftovers.decided(late, "late", Decision(problem="rank 1: no shard within 600 s", answered=False))
    leftovers.clear()
    assert late.exists()
    leftovers.decided(refused, "refused", Decision(problem="rank 1: No space left on device"))
    leftovers.clear()
    assert sorted(tmp_path.iterdir()) == sorted([under_way, other])


@pytest.mark.parametrize(("second_node", "kept"), [(None, True), ("null", True), ('"full"', False)], ids=["silent", "written", "full"])
def test_shards_stay_where_another_node_may_have_their_manifest(tmp_path: Path, second_node: str | None, kept: bool) -> None:
    ranks = two_ranks(nodes=2)
    leftovers = Leftovers(ranks)
    folder = shards_of(tmp_path / "step-1.a1")
    ranks.store.set("tag/written/0", '"the manifest can\'t be written"')
    if second_node is not None:
        ranks.store.set("tag/written/1", second_node)
    leftovers.decided(folder, "tag", Decision("manifest"))
    leftovers.clear()
    assert folder.exists() == kept


def test_a_commit_is_no_leftover(tmp_path: Path) -> None:
    leftovers = Leftovers(two_ranks(nodes=1))
    folder = shards_of(tmp_path / "step-1.a1")
    (folder / "manifest.json").touch()
    leftovers.decided(folder, "tag", Decision("manifest"))
    leftovers.clear()
    assert folder.exists()


def test_a_save_that_fails_or_is_left_out_is_an_event_and_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(None, 0)
    sent: list[dict[str, object]] = []
    reporter.agent.send = lambda event, **fields: sent.append({"event": event, "rank": 0, **fields})  # type: ignore[method-assign]
    reporter.open_logs(tmp_path, 0, attempt=1)
    report = SaveReport(reporter)
    report(Saved(2, tmp_path / "step-2.a1", 100, 0.5, 0.0, committed=False, problem="rank 1: No space left on device"))
    report.skip(4, 3)
    reporter.close()
    assert list(map(rank_report_from_json, sent)) == [SaveFailed(0, 2, "rank 1: No space left on device")]
    said = capsys.readouterr().out
    assert "CHECKPOINT step 2 FAILED: rank 1: No space left on device" in said
    assert "CHECKPOINT step 4 SKIPPED: step 3 is still being written" in said
    events = {event["kind"]: event for event in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())}
    assert (events["saveFailed"]["step"], events["saveFailed"]["problem"]) == (2, "rank 1: No space left on device")
    assert events["saveSkipped"]["step"] == 4
    assert report.metrics == {"saveSeconds": 0.5, "saveFailures": 1, "savesSkipped": 1}


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    ranks = replace(two_ranks(nodes=1), world_size=0)
    config = RunConfig("x", None, tmp_path, training())
    made = manifest_template(config, Start(1, None, VolumeView()), IDENTITY, {"names": {}}, ranks, Batches.TOKENS)
    assert decode(encode(made)) == made


def test_what_a_run_has_otherwise_than_the_commit_it_goes_on_from_is_told() -> None:
    before = training({"weightDecay": "0.1", "beta2": "0.95"})
    made = replace(manifest(), precision=before.precision.value, optimizer_settings=optimizer_settings(before.optimization))
    assert decode(encode(made)).optimizer_settings == made.optimizer_settings
    assert changed_settings(made, before) == []
    assert changed_settings(made, training({"weightDecay": "0", "beta2": "0.999", "epsilon": "1e-6"})) == [
        "training.optimization.weightDecay is 0.0 and was 0.1",
        "training.optimization.beta2 is 0.999 and was 0.95",
        "training.optimization.epsilon is 1e-06 and was 1e-08",
    ]
    older = replace(made, optimizer_settings={}, precision="FP32" if before.precision.value == "BF16" else "BF16")
    assert changed_settings(older, training({"beta2": "0.9"})) == [
        f"training.precision is {before.precision.value} and was {older.precision}"
    ]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_an_evaluation_that_is_not_finite_never_makes_a_commit_the_best(loss: float) -> None:
    description = Description(replace(manifest(), eval_loss=2.5, eval_step=50), plan=None, engine=None)  # type: ignore[arg-type]
    description.set_eval_loss(60, loss)
    assert (description.template.eval_loss, description.template.eval_step) == (2.5, 50)
    description.set_eval_loss(70, 2.0)
    assert (description.template.eval_loss, description.template.eval_step) == (2.0, 70)
