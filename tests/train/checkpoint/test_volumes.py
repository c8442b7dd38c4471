"""One volume or several: found out at the start; any one may be lost when each shard is on two; commits get their views and adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, RunFile

from lockstep_train.checkpoint.format.manifest import Manifest, decode
from train.checkpoint.test_resume import state


def manifest(commit: Path) -> Manifest:
    return decode((commit / "manifest.json").read_bytes())


def checksums(commit: Path) -> list[str]:
    return [shard.sha256 for shard in manifest(commit).shards]


@pytest.mark.parametrize("nodes", [2, 3])
def test_any_one_volume_may_be_lost_when_each_shard_is_on_two(ranks: ForkServer, run_file: RunFile, tmp_path: Path, nodes: int) -> None:
    settings: dict[str, Any] = {"zeroStage": "Stage3" if nodes == 2 else "Stage2", "checkpoint": {"replicas": 2, "everySteps": 1}}
    settings |= {"optimization": {"maxSteps": 2}, "evaluation": None}
    runs = [run_file(f"node-{node}", storage="PerPod", **settings) for node in range(nodes)]
    ended = ranks.run("main", runs, nodes=nodes)
    assert "only one copy" not in ended.output
    folders = [tmp_path / f"node-{node}" for node in range(nodes)]
    whole = checksums(folders[0] / "checkpoints/step-2.a1")
    for node, folder in enumerate(folders):
        assert manifest(folder / "checkpoints/step-2.a1").shards[node].nodes == (node, (node + 1) % nodes)
        shutil.rmtree(folder / "checkpoints/step-2.a1")
        shutil.copytree(folder, tmp_path / "kept" / folder.name, symlinks=True)
    for lost in range(nodes):
        for folder in folders:
            shutil.rmtree(folder)
            if folder != folders[lost]:
                shutil.copytree(tmp_path / "kept" / folder.name, folder, symlinks=True)
        ended = ranks.run("main", runs, nodes=nodes)
        assert "(step 1)" in ended.outputs[0]
        again = folders[lost] / "checkpoints"
        assert checksums(again / "step-2.a2") == whole
        held = {f"shard-r{rank:05d}-of-{nodes:05d}.safetensors" for rank in (lost, (lost - 1) % nodes)}
        assert {path.name for path in (again / "step-2.a2").glob("shard-*")} == held
        assert sorted(path.name for path in (again / "chain").iterdir()) == ["a1.json", "a2.json"]
    if nodes == 3:
        fewer_nodes_have_the_whole_state(ranks, runs[:2], tmp_path)


def test_nodes_with_unlike_numbers_of_ranks_and_nodes_of_one_rank_load_each_other_s_commits(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path
) -> None:
    """Two ranks on one node and one on another, then one on each of three, the third of which is new, and back: as if there had been no
    change.
    """
    settings: dict[str, Any] = {"checkpoint": {"replicas": 2, "everySteps": 1}, "optimization": {"maxSteps": 3}, "evaluation": None}
    first, second, third = (run_file(f"node-{node}", storage="PerPod", **settings) for node in range(3))
    commits = tmp_path / "node-0/checkpoints"

    def train(runs: list[Path], *nodes: int) -> str:
        ended = ranks.run("main", runs, nodes=nodes)
        assert "only one copy" not in ended.output
        return ended.outputs[0]

    def forget(*names: str) -> None:
        for name in names:
            for node in range(3):
                shutil.rmtree(tmp_path / f"node-{node}/checkpoints/{name}", ignore_errors=True)

    train([first, first, second], 2, 1)
    assert [shard.nodes for shard in manifest(commits / "step-3.a1").shards] == [(0, 1), (0, 1), (1, 0)]
    whole = checksums(commits / "step-3.a1")
    forget("step-3.a1", "step-2.a1")
    assert "(step 1)" in train([first, second, third], 1, 1, 1)
    assert [shard.nodes for shard in manifest(commits / "step-3.a2").shards] == [(0, 1), (1, 2), (2, 0)]
    assert checksums(commits / "step-3.a2") == whole
    forget("step-3.a2")
    assert "(step 2)" in train([first, first, second], 2, 1)
    assert checksums(commits / "step-3.a3") == whole


def fewer_nodes_have_the_whole_state(ranks: ForkServer, runs: list[Path], folder: Path) -> None:
    """Without the third volume and its node; neither of the other two has every shard of three."""
    for node in range(3):
        shutil.rmtree(folder / f"node-{node}")
    for node in range(2):
        shutil.copytree(folder / f"kept/node-{node}", folder / f"node-{node}", symlinks=True)
    ranks.run("resave", runs, nodes=2)
    before = shutil.copytree(folder / "kept/node-0/checkpoints/step-1.a1", folder / "before")
    shutil.copytree(folder / "kept/node-1/checkpoints/step-1.a1", before, dirs_exist_ok=True)
    assert state(folder / "node-0/checkpoints/step-1.a2") == state(folder / "node-1/checkpoints/step-1.a2") == state(before)


def test_a_neighbor_that_cannot_keep_a_copy_costs_the_copy_and_not_the_commit(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimization": {"maxSteps": 2}, "checkpoint": {"replicas": 2}, "evaluation": None}
    runs = [run_file(f"node-{node}", storage="PerPod", **settings) for node in range(2)]
    ended = ranks.run("keep_no_copies", runs, nodes=2, arguments={"node": 1})
    assert "shard-r00000-of-00002.safetensors of" in ended.outputs[0]
    assert "has only one copy" in ended.outputs[0]
    found = manifest(tmp_path / "node-0/checkpoints/step-2.a1")
    assert [shard.nodes for shard in found.shards] == [(0,), (1, 0)]


def test_volumes_that_are_not_the_one_they_pose_as_stop_the_start_by_name(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    runs = [run_file(f"node-{node}", storage="Shared") for node in range(2)]
    ended = ranks.run("impatient", runs, nodes=2, codes=78)
    assert f"node 1 does not see within 1 s what node 0 wrote to {tmp_path / 'node-0'}" in ended.outputs[0]
    assert not (tmp_path / "node-0/checkpoints").exists()
    assert list((tmp_path / "node-0").iterdir()) == []


def test_commits_have_views_that_go_with_them(ranks: ForkServer, run_file: RunFile, tmp_path: Path, model: Path) -> None:
    settings: dict[str, Any] = {
        "checkpoint": {"everySteps": 1, "keep": 2, "replicas": 2},
        "optimization": {"maxSteps": 4},
    }
    run = run_file("views", storage="Shared", **settings)
    ended = ranks.run("main", [run] * 2, nodes=2)
    assert "checkpoint.replicas has no effect" in ended.outputs[0]
    folder = tmp_path / "views"
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert sorted(path.readlink().name for path in folder.glob("checkpoint-*")) == kept
    view = folder / "checkpoint-4"
    assert json.loads((view / "adapter_config.json").read_text()) == json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (view / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    found = json.loads((view / "metadata.json").read_text())
    assert (found["num_shards"], found["step"], found["eval_step"]) == (2, 4, 4)
    assert [path.name for path in (folder / "checkpoints/readers").glob("*")] == []


def test_the_best_commit_is_kept_and_a_restart_knows_it(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": {"everySteps": 1, "keep": 2}, "evaluation": {"everySteps": 1}}
    run = run_file("best", **settings)
    losses = {"2": 1.0, "5": 1.5}
    ranks.run("evaluate_as", [run], arguments={"losses": losses, "until": 4}, codes=75)
    ranks.run("evaluate_as", [run], arguments={"losses": losses, "until": None})
    assert sorted(path.name for path in (tmp_path / "best/checkpoints").glob("step-*")) == ["step-2.a1", "step-5.a2", "step-6.a2"]
    assert manifest(tmp_path / "best/checkpoints/step-2.a1").eval_loss == 1.0
