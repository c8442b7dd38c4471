"""Which commit counts, what a manifest must hold, and what rotation may delete."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep_spec.codec import from_json, to_json
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint import resume
from lockstep_train.checkpoint.format import volume
from lockstep_train.checkpoint.format.layout import CommitName, parse_commit, parse_record
from lockstep_train.checkpoint.format.manifest import FragmentRecord, ShardRecord, decode, encode, shapes
from lockstep_train.checkpoint.format.volume import Claim, candidates, follows_chain, next_attempt
from lockstep_train.checkpoint.save.rotation import Rotation
from support.checkpoint_cases import IDENTITY, commits, make_commit, manifest, names, record


def test_names_are_parsed_as_they_are_written() -> None:
    assert parse_commit("step-100.a2") == CommitName(attempt=2, step=100)
    assert str(CommitName(attempt=2, step=100)) == "step-100.a2"
    assert [parse_commit(name) for name in ("step-1", "step-1.a2.tmp", ".trash-step-1.a1", "chain")] == [None] * 4
    assert (parse_record("a12.json"), parse_record(".a12.json.7.tmp")) == (12, None)


def test_the_newest_commit_of_the_newest_attempt_comes_first() -> None:
    found = candidates(commits("step-9.a1", "step-10.a1", "step-5.a1"), [record(1)])
    assert names(found) == ["step-10.a1", "step-9.a1", "step-5.a1"]


def test_readers_follow_the_starts_backwards() -> None:
    records = [record(1), record(2, "step-20.a1"), record(3, "step-30.a2")]
    found = candidates(commits("step-10.a1", "step-20.a1", "step-30.a2", "step-40.a3"), records)
    assert names(found) == ["step-40.a3", "step-30.a2", "step-20.a1", "step-10.a1"]


def test_a_late_commit_of_an_older_attempt_is_not_on_the_chain() -> None:
    records = [record(1), record(2, "step-20.a1")]
    assert names(candidates(commits("step-20.a1", "step-30.a1"), records)) == ["step-20.a1"]


def test_an_attempt_that_started_afresh_ends_the_chain() -> None:
    assert names(candidates(commits("step-20.a1", "step-5.a2"), [record(1), record(2)])) == ["step-5.a2"]


def test_an_attempt_that_skips_a_damaged_commit_leaves_it_behind_for_good() -> None:
    records = [record(1), record(2, "step-10.a1")]
    assert names(candidates(commits("step-10.a1", "step-20.a1", "step-15.a2"), records)) == ["step-15.a2", "step-10.a1"]


def test_a_forged_record_cannot_make_a_reader_walk_in_circles() -> None:
    assert names(candidates(commits("step-1.a1"), [record(1, "step-1.a1")])) == ["step-1.a1"]


def test_commits_without_a_record_of_any_attempt_do_not_count() -> None:
    assert candidates(commits("step-1.a1"), []) == []


def test_a_new_attempt_is_above_every_one_before_it() -> None:
    assert next_attempt([], Claim(None, None)) == 1
    assert next_attempt([], Claim(4, "u")) == 4
    assert next_attempt([record(1), record(7)], Claim(None, None)) == 8
    assert next_attempt([record(7, given=7, uid="old")], Claim(1, "new")) == 8
    assert next_attempt([record(7, given=7, uid="old"), record(8, given=1, uid="new")], Claim(2, "new")) == 9


@pytest.mark.parametrize("given", [1, 2])
def test_an_attempt_that_is_not_newer_than_one_of_its_job_is_refused(given: int) -> None:
    with pytest.raises(ConfigError, match=f"attempt {given} of this job is not newer than attempt 2"):
        next_attempt([record(1, given=1, uid="u"), record(2, given=2, uid="u")], Claim(given, "u"))


@pytest.mark.parametrize(
    ("resume_from", "uid", "follows"),
    [
        ("Auto", "other", True),
        ("Auto", None, True),
        ("None", "u", True),
        ("None", "other", False),
        ("None", None, False),
        ("/path", "u", True),
        ("/path", "other", False),
    ],
)
def test_only_a_jobs_first_attempt_may_leave_the_chain(resume_from: str, uid: str | None, follows: bool) -> None:
    assert follows_chain([record(1, given=1, uid="u")], resume_from, Claim(1, uid)) is follows


def shard(*fragments: tuple[str, tuple[int, ...], int, int]) -> ShardRecord:
    return ShardRecord("shard-r00000-of-00001.safetensors", 1, "0", tuple(FragmentRecord(*fragment) for fragment in fragments))


def test_a_manifest_comes_back_as_it_was_written() -> None:
    second = replace(shard(("w", (2, 3), 4, 2)), file="shard-r00001-of-00002.safetensors", nodes=(1, 0))
    written = replace(manifest(shard(("w", (2, 3), 0, 4)), second), content="Lite", eval_loss=1.25, eval_step=100)
    assert decode(encode(written)) == written


@pytest.mark.parametrize("text", ['{"format": "other/1"}', "[]", '{"format": "lockstep-checkpoint/1"}', '{"format": "lockstep-chec'])
def test_a_manifest_that_is_not_whole_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


def test_fragments_that_cover_each_element_once_give_the_shapes() -> None:
    assert shapes([shard(("w", (2, 3), 4, 2), ("v", (5,), 0, 5)), shard(("w", (2, 3), 0, 4), ("v", (5,), 5, 0))]) == {
        "w": (2, 3),
        "v": (5,),
    }


@pytest.mark.parametrize("fragments", [[(0, 4)], [(0, 4), (5, 1)], [(0, 4), (3, 3)], [(0, 6), (0, 6)]])
def test_fragments_with_gaps_or_overlaps_are_refused(fragments: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="w"):
        shapes([shard(*(("w", (2, 3), start, numel) for start, numel in fragments))])


def test_differences_are_named_in_the_words_of_the_job_file() -> None:
    other = replace(IDENTITY, settings={"lora.rank": 8, "lora.targetModules": ["k_proj", "q_proj"], "lora.dora": True}, parameters="others")
    assert IDENTITY.differences(other) == ["lora.rank is 16, not 8", "lora.dora is the default, not true"]
    assert IDENTITY.differences(replace(IDENTITY, parameters="others")) == ["the set of trainable parameters is parameters, not others"]
    assert IDENTITY.differences(IDENTITY) == []
    assert IDENTITY.differences(replace(IDENTITY, base="0123456789abcdef")) == ["the base model is base, not 0123456789ab"]


def make_commits(checkpoints: Path, *found: str) -> None:
    for name in found:
        make_commit(checkpoints, name)


def test_rotation_deletes_the_oldest_of_the_chain_and_nothing_else(tmp_path: Path) -> None:
    make_commits(tmp_path, "step-1.a1", "step-2.a1", "step-3.a1", "step-4.a2", "step-9.a1")
    volume.write_record(tmp_path, record(1))
    volume.write_record(tmp_path, record(2, "step-3.a1"))
    assert names(Rotation(tmp_path, keep=3).rotate()) == ["step-1.a1"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["chain", "step-2.a1", "step-3.a1", "step-4.a2", "step-9.a1"]


def test_a_folder_without_a_manifest_is_no_commit_and_is_swept_at_the_next_start(tmp_path: Path) -> None:
    make_commits(tmp_path, "step-1.a1")
    (tmp_path / "step-2.a1").mkdir()
    assert names(volume.commit_names(tmp_path)) == ["step-1.a1"]
    volume.sweep(tmp_path, committed=[])
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1.a1"]


def test_shards_whose_manifest_is_on_another_volume_alone_are_not_swept(tmp_path: Path) -> None:
    (tmp_path / "step-2.a1").mkdir()
    volume.sweep(tmp_path, committed=commits("step-2.a1"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-2.a1"]


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, TrainerError), (errno.EACCES, None)])
def test_a_record_that_can_t_be_read_now_starts_no_run_from_an_older_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[TrainerError] | None
) -> None:
    volume.write_record(tmp_path, record(1))
    make_commit(tmp_path, "step-2.a1")
    whole = volume.read_view(tmp_path)

    def fail(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "read_bytes", fail)
    torn = from_json(volume.VolumeView, json.loads(json.dumps(to_json(volume.read_view(tmp_path)))), "view")
    assert torn.damaged == (1,)
    assert volume.merge_views([torn, whole]) == whole, "the other volume has it"
    said: list[str] = []
    alone = Ranks(0, 1, 0, 1, 0, 1, torch.device("cpu"), dist.HashStore())  # type: ignore[attr-defined]
    with pytest.raises(TrainerError) if kind else contextlib.nullcontext() as failed:
        resume.choose_start(alone, tmp_path, "Auto", Claim(None, None), said.append)
    if failed is not None:
        assert (
            str(failed.value)
            == f"{tmp_path}/chain/a1.json can't be read: Input/output error; this may pass, and the next attempt tries it again"
        )
        assert failed.value.exit_code == 1
    assert (said == []) is (kind is TrainerError)


def test_a_damaged_record_is_left_out(tmp_path: Path) -> None:
    volume.write_record(tmp_path, record(1))
    (tmp_path / "chain" / "a2.json").write_text(json.dumps({"start": None}))
    (tmp_path / "chain" / "a3.json").write_text("{")
    assert volume.read_view(tmp_path).records == (record(1),)
