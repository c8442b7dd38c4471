"""What is saved is what is loaded, and the run that follows is the run that would have been."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from rank_harness import ForkServer, RunFile
from references import Reference
from safetensors.numpy import load_file

from lockstep_train import generate
from lockstep_train.base.errors import ConfigError
from lockstep_train.checkpoint.format.manifest import Manifest, decode, encode
from lockstep_train.export import export
from lockstep_train.merge import merge
from support.rounding import SAME_LOSS, same_rounding_tolerance
from train.checkpoint.test_checkpoint import FIVE_STEPS, start_of


def manifest(commit: Path) -> Manifest:
    return decode((commit / "manifest.json").read_bytes())


def checksums(commit: Path) -> list[str]:
    return [shard.sha256 for shard in manifest(commit).shards]


def state(commit: Path) -> dict[tuple[str, str], bytes]:
    """Every parameter's masters and moments, whole, as bytes."""
    found = manifest(commit)
    shapes = {fragment.name: fragment.shape for shard in found.shards for fragment in shard.fragments}
    whole = {
        (name, kind): numpy.full(numpy.prod(shape), numpy.nan, numpy.float32)
        for name, shape in shapes.items()
        for kind in ("fp32", "exp_avg", "exp_avg_sq")
    }
    for shard in found.shards:
        tensors, offset = load_file(commit / shard.file), 0
        for fragment in shard.fragments:
            for kind, values in tensors.items():
                whole[fragment.name, kind][fragment.start : fragment.start + fragment.numel] = values[offset : offset + fragment.numel]
            offset += fragment.numel
    assert not any(numpy.isnan(values).any() for values in whole.values())
    return {key: values.tobytes() for key, values in whole.items()}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "logs/train_log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("stage", "precision"), [("Stage2", "FP32"), ("Stage3", "BF16"), ("Stage2", "FP16")])
def test_a_resumed_run_ends_bitwise_where_an_uninterrupted_one_ends(
    ranks: ForkServer, run_file: RunFile, reference: Reference, tmp_path: Path, stage: str, precision: str
) -> None:
    """Mid-epoch and into the next one, inside the warm-up, with accumulation and clipping, dropout on; in FP16 while the loss scale still
    seeks its height.
    """
    optimization = {"maxSteps": 4, "globalBatchSize": 10}
    settings: dict[str, Any] = {"zeroStage": stage, "precision": precision, "lora": {"dropout": "0.1"}, "optimization": optimization}
    target = "main"
    if precision == "FP16":
        target, settings["deepspeed"] = "train_in_fp16", {"fp16": {"initial_scale_power": 20, "hysteresis": 1}}
    whole = reference(2, target=target, **settings)
    scaler = manifest(whole / "checkpoints/step-2.a1").loss_scaler
    assert (scaler is not None and scaler["cur_scale"] < 1 << 20) == (precision == "FP16"), "no step overflowed: nothing to remember"
    start_of(whole, tmp_path / "resumed", "step-2.a1")
    ended = ranks.run(target, [run_file("resumed", **settings)] * 2)
    assert "Resuming from" in ended.outputs[0]
    assert checksums(tmp_path / "resumed/checkpoints/step-4.a2") == checksums(whole / "checkpoints/step-4.a1")
    assert [line["step"] for line in map(json.loads, (tmp_path / "resumed/logs/train_log.jsonl").read_text().splitlines())] == [3, 4]


@pytest.fixture
def saved(reference: Reference, tmp_path: Path) -> Callable[[str], Path]:
    """Copy the commit of step 2 of two ranks, for a stage."""

    def commit(stage: str) -> Path:
        return start_of(reference(2, zeroStage=stage, **FIVE_STEPS), tmp_path / f"saved-{stage}", "step-2.a1")

    return commit


@pytest.mark.parametrize(
    ("saved_stage", "stage", "world_size"), [("Stage3", "Stage2", 2), ("Stage2", "Stage1", 2), ("Stage2", "Stage3", 4)]
)
def test_another_size_or_stage_loads_the_same_state_bitwise(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, saved: Callable[[str], Path], saved_stage: str, stage: str, world_size: int
) -> None:
    commit = saved(saved_stage)
    path = run_file("again", zeroStage=stage, checkpoint={"resumeFrom": str(commit)})
    ranks.run("resave", [path] * world_size)
    again = tmp_path / "again" / "checkpoints" / "step-2.a1"
    assert manifest(again).world_size == world_size
    assert state(again) == state(commit)
    assert manifest(again).samples_consumed == manifest(commit).samples_consumed == 14


def test_from_one_rank_to_two_three_and_back_the_state_stays_bitwise(
    ranks: ForkServer, run_file: RunFile, reference: Reference, tmp_path: Path
) -> None:
    """In one folder, each attempt from the commit of the one before it, the stage changing as well."""
    whole = state(start_of(reference(1, optimization={"maxSteps": 2}), tmp_path / "sizes", "step-2.a1"))
    checkpoints = tmp_path / "sizes/checkpoints"
    for attempt, (world_size, stage) in enumerate([(2, "Stage3"), (3, "Stage2"), (2, "Stage3")], start=2):
        ranks.run("resave", [run_file("sizes", zeroStage=stage)] * world_size)
        again = checkpoints / f"step-2.a{attempt}"
        assert (manifest(again).world_size, manifest(again).zero_stage) == (world_size, stage)
        assert state(again) == whole


def test_a_second_copy_of_the_weights_on_each_node_changes_nothing_in_what_is_learned_and_saved(
    ranks: ForkServer, run_file: RunFile, reference: Reference, tmp_path: Path
) -> None:
    """ZeRO++ hpZ on 2 nodes of 2 ranks beside a run without it; then from the one's commit to the other. The loss after a load is that of
    the state.
    """
    settings: dict[str, Any] = {"zeroStage": "Stage3", "checkpoint": {"everySteps": 1}, "evaluation": None}
    without = reference(4, nodes=2, optimization={"maxSteps": 3}, hierarchicalPartition="Auto", **settings)
    assert "second copy" not in (without / "output.txt").read_text()

    def train(name: str, choice: str, last_step: int) -> str:
        path = run_file(name, hierarchicalPartition=choice, optimization={"maxSteps": last_step}, **settings)
        ended = ranks.run("main", [path] * 4, nodes=2)
        assert ("second copy / 2 ranks of a node" in ended.output) is (choice == "Node")
        return ended.outputs[0]

    first, expected = (
        [line.split("|")[1] for line in output.splitlines() if line.startswith("Step ")]
        for output in (train("with", "Node", 2), (without / "output.txt").read_text())
    )
    assert len(expected) == 3
    assert first == expected[:2]
    for source, name, choice, step in ((tmp_path / "with", "left", "None", 1), (without, "taken-up", "Node", 2)):
        start_of(source, tmp_path / name, f"step-{step}.a1")
        train(name, choice, step + 1)
        assert losses(tmp_path / name) == pytest.approx([losses(without)[step]], rel=SAME_LOSS)


@pytest.mark.parametrize(
    ("precision", "world_size", "stage", "tolerance"),
    [("FP32", 3, "Stage3", SAME_LOSS), ("BF16", 1, "Stage3", same_rounding_tolerance("BF16", longest_sum=127, terms=14 * 5))],
)
def test_a_run_goes_on_with_other_ranks_as_it_would_have_with_the_same(
    ranks: ForkServer,
    run_file: RunFile,
    reference: Reference,
    tmp_path: Path,
    precision: str,
    world_size: int,
    stage: str,
    tolerance: float,
) -> None:
    optimization = {"maxSteps": 4, "globalBatchSize": 14, "learningRate": "5e-4"}  # a usual one: large steps enlarge the roundings of BF16
    settings: dict[str, Any] = {"precision": precision, "optimization": optimization, "evaluation": None}
    whole = reference(2, **settings)
    start_of(whole, tmp_path / "other", "step-2.a1")
    settings["optimization"]["globalBatchSize"] = None  # the commit's counts
    ranks.run("main", [run_file("other", **settings, zeroStage=stage)] * world_size)
    expected = losses(whole)[2:]
    assert losses(tmp_path / "other") == pytest.approx(expected, rel=tolerance)
    assert all(after != pytest.approx(before, rel=tolerance) for before, after in itertools.pairwise(expected)), "equal losses say nothing"


def test_no_sample_is_lost_or_repeated_over_a_crash_and_another_size(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    def trained(folder: str, steps: range) -> dict[int, list[int]]:
        """Step → the samples of all ranks, in the order of their numbers."""
        found: dict[int, list[int]] = {}
        for path in (tmp_path / folder).iterdir():
            for step, samples in map(json.loads, path.read_text().splitlines()):
                found[step] = sorted([*found.get(step, []), *samples])
        return {step: samples for step, samples in found.items() if step in steps}

    for folder in ("all", "before", "after"):
        (tmp_path / folder).mkdir()
    settings: dict[str, Any] = {"evaluation": None, "optimization": {"globalBatchSize": 14}}  # 76 samples: the last step is a short one
    ranks.run("record_samples", [run_file("whole", **settings)], arguments={"output": str(tmp_path / "all"), "kill": None})
    path = run_file("crashed", **settings)
    died = ranks.run(
        "record_samples", [path] * 2, arguments={"output": str(tmp_path / "before"), "kill": 5}, codes=None, kill_rest_after_first=True
    )
    assert died.codes[1] == -9, died.output
    ranks.run("record_samples", [path] * 3, arguments={"output": str(tmp_path / "after"), "kill": None})
    start = min(trained("after", range(99)))
    assert start > 1, "the crash left no commit"
    assert trained("before", range(1, start)) | trained("after", range(start, 99)) == trained("all", range(99))


def test_a_lite_commit_gives_its_weights_and_an_optimizer_that_starts_afresh(
    ranks: ForkServer, run_file: RunFile, reference: Reference, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"precision": "BF16", "checkpoint": {"content": "Lite"}, "optimization": {"maxSteps": 3}, "evaluation": None}
    lite = reference(2, **settings)
    for name, stage, world_size in (("one", "Stage2", 1), ("three", "Stage3", 3)):
        commit = start_of(lite, tmp_path / name, "step-2.a1")
        runs = [run_file(name, zeroStage=stage, **settings)] * world_size
        ended = ranks.run("started_from_lite", runs, arguments={"commit": str(commit)})
        assert "step-2.a1 is Lite: its weights are loaded, and the optimizer's moments start at zero" in ended.outputs[0]


def test_volumes_of_their_own_hold_a_part_each_and_resume_together(
    ranks: ForkServer, run_file: RunFile, reference: Reference, tmp_path: Path
) -> None:
    """Two nodes whose run folders are different volumes."""
    settings: dict[str, Any] = {"zeroStage": "Stage3", "optimization": {"maxSteps": 3}, "checkpoint": {"everySteps": 1}, "evaluation": None}
    whole = reference(2, nodes=2, **settings)
    runs = [run_file(f"node-{node}", **settings) for node in range(2)]
    ranks.run("main", runs, nodes=2)
    for node in range(2):
        commit = tmp_path / f"node-{node}" / "checkpoints" / "step-3.a1"
        assert [path.name for path in commit.glob("shard-*")] == [f"shard-r0000{node}-of-00002.safetensors"]
        assert (tmp_path / f"node-{node}" / "adapter" / "adapter_model.safetensors").exists()
        shutil.rmtree(commit)
        shutil.rmtree(tmp_path / f"node-{node}" / "checkpoints" / "step-2.a1")
    torn = tmp_path / "node-0/checkpoints/step-1.a1/manifest.json"
    torn.write_bytes(torn.read_bytes()[:-9])  # the other volume's copy counts, and mends it
    ranks.run("main", runs, nodes=2)
    assert torn.read_bytes() == (tmp_path / "node-1/checkpoints/step-1.a1/manifest.json").read_bytes()
    assert checksums(tmp_path / "node-1/checkpoints/step-3.a2") == checksums(whole / "checkpoints/step-3.a1")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"lora": {"rank": 4, "targetModules": ["q_proj"]}, "seed": 7},
            ["lora.rank is 5, not 4", "lora.targetModules is down_proj, q_proj, v_proj, not q_proj", "the seed is 42, not 7"],
        ),
        (
            {"lora": {"dora": True, "rankStabilized": True}},
            ["lora.rankStabilized is the default, not true, and lora.dora is the default, not true"],
        ),
        ({"method": "Full"}, ["method is the default, not Full"]),
        (
            {"data": {"maxLength": 32, "overlong": "Split"}},
            ["the dataset is ", "data.maxLength is 64, not 32", "data.overlong is the default, not Split"],
        ),
        ({"optimization": {"globalBatchSize": 10}}, ["globalBatchSize is 10, but the commit"]),
    ],
)
def test_a_commit_of_another_run_is_refused_by_naming_the_differences(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, saved: Callable[[str], Path], change: dict[str, Any], named: list[str]
) -> None:
    commit = saved("Stage2")
    ended = ranks.run("main", [run_file("other", checkpoint={"resumeFrom": str(commit)}, **change)], codes=78)
    assert [text for text in named if text not in ended.output] == []


def test_a_run_that_goes_on_with_other_settings_of_its_optimizer_says_so(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, saved: Callable[[str], Path]
) -> None:
    commit = saved("Stage2")
    ended = ranks.run("main", [run_file("other", checkpoint={"resumeFrom": str(commit)}, optimization={"maxSteps": 3, "beta2": "0.9"})])
    assert "Changed since that commit: training.optimization.beta2 is 0.9 and was 0.999\n" in ended.output


def test_a_commit_of_another_base_model_is_refused(ranks: ForkServer, run_file: RunFile, tmp_path: Path, model: Path) -> None:
    """4,000 bytes in the middle of a file were changed between attempts, with the time of change put back; merge and others know the right
    one.
    """
    base = shutil.copytree(model, tmp_path / "base")
    path = run_file("run", model={"name": str(base)}, optimization={"maxSteps": 1}, evaluation=None)
    ranks.run("main", [path])
    weights = base / "model.safetensors"
    times, content = weights.stat(), bytearray(weights.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = bytes(byte ^ 0x11 for byte in content[middle : middle + 4000])
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    path = run_file("run", model={"name": str(base)})
    ended = ranks.run("main", [path] * 2, codes=78)
    assert (
        f"{base} is not the base model that {tmp_path}/run/checkpoints/step-1.a1 was trained on: model.safetensors had SHA-256 "
        in ended.output
    )
    assert "or set training.checkpoint.resumeFrom to None to train anew on these" in ended.output
    with pytest.raises(ConfigError, match=r"is not the base model that step 1 was trained on: model\.safetensors had"):
        merge([tmp_path / "run"], tmp_path / "merged")
    with pytest.raises(ConfigError, match=r"is not the base model that the adapter .* was trained on: model\.safetensors had"):
        generate.load(base, tmp_path / "run/adapter")
    export([tmp_path / "run"], tmp_path / "exported")
    assert (tmp_path / "exported/base_files.json").read_bytes() == (tmp_path / "run/adapter/base_files.json").read_bytes()
    started = run_file("second", model={"name": str(base)}, lora={"initFrom": str(tmp_path / "run/adapter")})
    ended = ranks.run("main", [started], codes=78)
    assert f"training.lora.initFrom {tmp_path}/run/adapter was trained on: model.safetensors had SHA-256 " in ended.output


def test_a_node_with_another_base_model_is_named(ranks: ForkServer, run_file: RunFile, tmp_path: Path, model: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x00\x40\x40")  # one weight becomes 3.0
    runs = [run_file(f"node-{node}", model={"name": str(folder)}) for node, folder in enumerate((model, other))]
    ended = ranks.run("main", runs, nodes=2, codes=78)
    assert f"the base model {model} is not the same on all nodes: model.safetensors has SHA-256 " in ended.output
    assert " on node 1; copy the same files to all of them" in ended.output


def test_a_commit_from_before_hashes_is_compared_by_what_it_recorded(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, saved: Callable[[str], Path]
) -> None:
    commit = shutil.copytree(saved("Stage2"), tmp_path / "old/checkpoints/step-2.a1")
    old = manifest(commit)
    old = replace(old, identity=replace(old.identity, base_files={}, data_files={}))
    (commit / "manifest.json").write_bytes(encode(old))
    settings: dict[str, Any] = {"checkpoint": {"resumeFrom": str(commit)}, "optimization": {"maxSteps": 3}}
    ranks.run("main", [run_file("goes-on", **settings)])
    assert manifest(tmp_path / "goes-on/checkpoints/step-3.a1").identity.base_files
    (commit / "manifest.json").write_bytes(encode(replace(old, identity=replace(old.identity, base="0" * 64))))
    ended = ranks.run("main", [run_file("refused", **settings)], codes=78)
    assert "the base model is 000000000000, not " in ended.output


def test_weights_that_are_no_numbers_are_named_and_not_the_learning_rate(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, model: Path
) -> None:
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if "up_proj" in name)
    weights[name][3, 3] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    for stage in ("Stage2", "Stage3"):
        ended = ranks.run("main", [run_file(f"run-{stage}", model={"name": str(broken)}, zeroStage=stage, evaluation=None)] * 2, codes=78)
        assert "the cause is the base model: its weight " in ended.output
        assert f"holds NaN or infinite values; put the right files into {broken}" in ended.output


def test_an_attempt_that_is_not_newer_is_refused(ranks: ForkServer, run_file: RunFile) -> None:
    path = run_file("fenced", uid="uid-1", optimization={"maxSteps": 1}, evaluation=None)
    ranks.run("main", [path], LOCKSTEP_ATTEMPT="2")
    ended = ranks.run("main", [path], LOCKSTEP_ATTEMPT="2", codes=78)
    assert "attempt 2 of this job is not newer than attempt 2" in ended.output


def test_a_second_job_of_a_finished_run_says_that_nothing_is_left_and_how_to_train_anew(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path
) -> None:
    run: dict[str, Any] = {"optimization": {"maxSteps": 1}, "evaluation": None}
    ranks.run("main", [run_file("done", uid="uid-1", **run)], LOCKSTEP_ATTEMPT="1")
    told = "othing was left to do: step 1 of 1 is in "
    again = ranks.run("main", [run_file("done", uid="uid-2", **run)], LOCKSTEP_ATTEMPT="1")
    assert f"N{told}{tmp_path / 'done/checkpoints/step-1.a1'}; to train anew, set training.checkpoint.resumeFrom to None" in again.output
    restarted = ranks.run("main", [run_file("done", uid="uid-1", **run)], LOCKSTEP_ATTEMPT="3")
    assert told not in restarted.output  # a restart of the job that did them


def test_resume_from_none_starts_again_but_a_restart_of_that_job_goes_on(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    run: dict[str, Any] = {"optimization": {"maxSteps": 1}, "evaluation": None}
    ranks.run("main", [run_file("fresh", uid="uid-1", **run)], LOCKSTEP_ATTEMPT="1")
    path = run_file("fresh", uid="uid-2", checkpoint={"resumeFrom": "None"}, **run)
    first = ranks.run("main", [path], LOCKSTEP_ATTEMPT="1")
    assert "Resuming from" not in first.output
    assert "othing was left to do" not in first.output
    again = ranks.run("main", [path], LOCKSTEP_ATTEMPT="2")
    assert f"Resuming from {tmp_path / 'fresh/checkpoints/step-1.a2'}" in again.output
