"""What is kept on disk of the data: made once, found again, checked, made again when it is damaged; and what identifies a run's data."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from lockstep_spec.choices import OnBroken, Overlong, TrainOn
from lockstep_spec.training import DataConfig, EvaluationConfig, SamplesConfig, SourceConfig
from lockstep_train.base import arrays, cache
from lockstep_train.base.arrays import Arrays, ArrayWriter, Damaged, open_arrays
from lockstep_train.base.cache import cache_folder
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.data.dataset import Dataset, content_digest, resolve_source, sequence_settings
from lockstep_train.data.read.records import Conversation, Sample
from lockstep_train.data.tokens import source as source_module
from lockstep_train.data.tokens.source import tokens_of
from lockstep_train.data.tokens.tokenizer import Tokenizer
from unit.train.data.data_cases import BYTES, dataset_of, text_of, write_jsonl
from unit.virtual_time import VirtualClock

RECORDS = [{"text": "x" * (number % 7) + str(number)} for number in range(50)]


def counting(calls: list[str]) -> Tokenizer:
    def encode(text: str) -> list[int]:
        calls.append(text)
        return list(text.encode())

    return dataclasses.replace(BYTES, encode=encode)


def content(dataset: Dataset) -> list[tuple[list[int], list[int]]]:
    return [(example.ids.tolist(), example.labels.tolist()) for example in dataset.training]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_jsonl(tmp_path / "x.jsonl", RECORDS))


def test_tokens_are_made_once_also_for_other_lengths_and_packing(tmp_path: Path, data: str) -> None:
    calls: list[str] = []
    first = dataset_of(tmp_path / "cache", counting(calls), path=data)
    tokenized = sum(text in calls for text in (record["text"] for record in RECORDS))
    assert tokenized == 50
    del calls[:]
    again = dataset_of(tmp_path / "cache", counting(calls), path=data)
    dataset_of(tmp_path / "cache", counting(calls), path=data, max_length=8)
    dataset_of(tmp_path / "cache", counting(calls), path=data, packing=True)
    assert calls == []
    assert (content(again), again.digest) == (content(first), first.digest)


def test_changed_data_is_tokenized_anew(tmp_path: Path, data: str) -> None:
    first = dataset_of(tmp_path / "cache", path=data)
    write_jsonl(Path(data), [{"text": "other"}])
    changed = dataset_of(tmp_path / "cache", path=data)
    assert [text_of(example.ids) for example in changed.training] == ["other"]
    assert changed.digest != first.digest


def test_another_tokenizer_has_tokens_of_its_own(tmp_path: Path, data: str) -> None:
    first = dataset_of(tmp_path / "cache", path=data)
    shifted = dataclasses.replace(BYTES, encode=lambda text: [byte + 1 for byte in text.encode()], digest="other")
    assert dataset_of(tmp_path / "cache", shifted, path=data).training[0].ids.tolist() != first.training[0].ids.tolist()


@pytest.mark.parametrize("part", ["tokens", "plans"])
@pytest.mark.parametrize("damage", ["a flipped bit", "a missing end", "no index", "a garbled index"])
def test_a_damaged_cache_is_made_again_and_told(tmp_path: Path, data: str, part: str, damage: str) -> None:
    first = dataset_of(tmp_path / "cache", path=data)
    before = content(first)
    name = {"tokens": "ids", "plans": "spans"}[part]
    victim = next(path for path in sorted((tmp_path / "cache" / part).rglob(name)) if path.stat().st_size)
    if damage == "a flipped bit":
        whole = bytearray(victim.read_bytes())
        whole[len(whole) // 2] ^= 1
        victim.write_bytes(whole)
    elif damage == "a missing end":
        os.truncate(victim, victim.stat().st_size - 4)
    elif damage == "no index":
        (victim.parent / "index.json").unlink()
    else:
        (victim.parent / "index.json").write_text("{")
    told: list[str] = []
    again = dataset_of(tmp_path / "cache", path=data, told=told)
    assert (content(again), again.digest) == (before, first.digest)
    assert any(line.startswith("Rebuilding the ") for line in told)
    told.clear()
    dataset_of(tmp_path / "cache", path=data, told=told)
    assert told == []


def test_a_folder_of_arrays_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "key", {"a": "<i4"})
    writer.append("a", numpy.arange(3))
    assert not (tmp_path / "key").exists()
    with pytest.raises(Damaged):
        open_arrays(tmp_path / "key", verify=True)
    writer.commit({"rows": 3})
    assert open_arrays(tmp_path / "key", verify=True)["a"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_of_two_builders_of_one_folder_both_are_served(tmp_path: Path) -> None:
    writers = [ArrayWriter(tmp_path / "key", {"a": "<i4"}) for _ in range(2)]
    for writer in writers:
        writer.append("a", numpy.arange(3))
        writer.commit({})
    assert open_arrays(tmp_path / "key", verify=True)["a"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("part", ["tokens", "plans"])
def test_what_another_job_has_made_since_the_look_stays(tmp_path: Path, data: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This job finds nothing or damage there; before it goes on, the other one has made it."""
    cache = tmp_path / "cache"
    first = dataset_of(cache, path=data)
    victim = next(path for path in sorted((cache / part).rglob("index.json")))
    victim.write_text("{")
    made: list[int] = []
    real = arrays.open_arrays

    def late(folder: Path, verify: bool) -> Arrays:
        try:
            return real(folder, verify)
        except Damaged:
            if not made:
                made.append(0)
                dataset_of(cache, path=data)
                made.append(victim.stat().st_ino)
            raise

    monkeypatch.setattr(arrays, "open_arrays", late)
    assert dataset_of(cache, path=data).digest == first.digest
    assert made == [0, victim.stat().st_ino]


def test_a_folder_that_appears_after_a_failed_look_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(folder: Path, verify: bool) -> Arrays:
        folder.mkdir()
        raise Damaged("nothing was there")

    monkeypatch.setattr(arrays, "open_arrays", late)
    assert arrays.whole_arrays(tmp_path / "key", lambda problem: None) is None
    assert (tmp_path / "key").is_dir()


def test_what_a_killed_builder_left_is_removed_when_nobody_writes_to_it(tmp_path: Path) -> None:
    abandoned = ArrayWriter(tmp_path / "key", {"a": "<i4"})
    abandoned.append("a", numpy.arange(3))
    ArrayWriter(tmp_path / "key", {"a": "<i4"}).discard()
    assert len(list(tmp_path.iterdir())) == 1
    for path in [*tmp_path.rglob("*")]:
        os.utime(path, (0, time.time() - 3590))
    ArrayWriter(tmp_path / "key", {"a": "<i4"}).discard()
    assert len(list(tmp_path.iterdir())) == 1, "its builder may write to it again within the hour"
    for path in [*tmp_path.rglob("*")]:
        os.utime(path, (0, time.time() - 3610))
    ArrayWriter(tmp_path / "key", {"a": "<i4"}).discard()
    assert list(tmp_path.iterdir()) == []
    abandoned.discard()


def test_broken_data_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{\n')
    with pytest.raises(ConfigError, match=r"x\.jsonl:2"):
        dataset_of(tmp_path / "cache", path=str(tmp_path / "x.jsonl"))
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def read_while(change: Callable[[Path], None], data: str, folder: Path) -> Arrays:
    """The tokens of a file that changes once, between the look at its sum and its reading."""
    changed: list[Path] = []

    def digest(path: Path, cache: Path) -> str:
        before = content_digest(path, cache)
        if path not in changed:
            changed.append(path)
            change(path)
        return before

    source = resolve_source(SourceConfig(data), folder, print, digest)
    return tokens_of(source, BYTES, TrainOn.ALL, folder / "tokens", print)


def test_a_file_that_grows_while_it_is_read_is_not_kept_under_the_sum_of_what_it_was(tmp_path: Path, data: str) -> None:
    def grow(path: Path) -> None:
        with path.open("a") as file:
            file.write('{"text": "later"}\n')

    with pytest.raises(TrainerError, match=r"x\.jsonl changed while it was read; the next attempt reads it again") as failed:
        read_while(grow, data, tmp_path / "cache")
    assert failed.value.exit_code == 1
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    assert len(dataset_of(tmp_path / "cache", path=data).training) == len(RECORDS) + 1


def test_a_file_whose_times_change_while_it_is_read_is_used(tmp_path: Path, data: str) -> None:
    assert len(read_while(lambda path: os.utime(path, (1, 1)), data, tmp_path / "cache")["lines"]) == len(RECORDS)


def test_notes_on_tokens_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    for name in ("old.jsonl", "new.jsonl"):
        path = write_jsonl(tmp_path / name, [{"text": "a"}, {"txt": 1}])
        notes = dataset_of(tmp_path / "cache", path=str(path), on_broken=OnBroken.DROP).notes
        assert any(note.startswith(f"WARNING: {path}: leaving out 1 broken lines: {path}:2: neither") for note in notes)
        (tmp_path / name).rename(tmp_path / "moved.jsonl")
    assert len(list((tmp_path / "cache/tokens").iterdir())) == 1


def test_a_batch_ends_at_so_many_characters_too_so_that_long_documents_need_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "BATCH", 3)
    monkeypatch.setattr(source_module, "BATCH_CHARACTERS", 100)
    said = Conversation(({"role": "user", "content": "x" * 90},), 0, (), 7)
    samples = [
        Sample("x" * length, prompt, 1) for length, prompt in ((40, None), (40, "y" * 20), (1, None), (2, None), (3, None), (300, None))
    ]
    found = list(source_module.batches(iter([*samples, said, samples[2]])))
    assert found == [samples[:2], samples[2:5], samples[5:6], [said], samples[2:3]]
    assert list(source_module.batches(iter([]))) == []
    lines: list[str] = []
    large = [*samples, replace(samples[5], line=7)]
    assert list(source_module.with_large_named(iter(large), "a.jsonl", lines.append)) == large
    assert [line.partition(" characters")[0] for line in lines] == [f"WARNING: a.jsonl:{number} is one sample of 300" for number in (1, 7)]


def test_a_batch_has_at_most_four_million_characters_and_one_more_sample() -> None:
    samples: list[Any] = [SimpleNamespace(characters=900_000)] * 11
    assert [len(batch) for batch in source_module.batches(iter(samples))] == [5, 5, 1]


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled though they were written just now."""
    monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)


@pytest.mark.parametrize(("age", "is_believed"), [(1.9, False), (2.1, True)])
def test_a_file_that_changed_less_than_two_seconds_ago_is_not_believed_to_be_done(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch, age: float, is_believed: bool
) -> None:
    monkeypatch.setattr(cache, "time", VirtualClock(Path(data).stat().st_ctime + age))
    content_digest(Path(data), tmp_path / "cache")
    assert any((tmp_path / "cache").rglob("*.json")) == is_believed


@pytest.mark.usefixtures("settled")
def test_a_file_is_hashed_once_while_it_doesnt_change(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    real = cache.file_digest
    monkeypatch.setattr(cache, "file_digest", lambda path: (reads.append(path), real(path))[1])
    first = content_digest(Path(data), tmp_path / "cache")
    assert content_digest(Path(data), tmp_path / "cache") == first
    assert len(reads) == 1
    os.utime(data, (1, 1))
    assert content_digest(Path(data), tmp_path / "cache") == first
    assert len(reads) == 2


@pytest.mark.usefixtures("settled")
def test_a_change_of_the_same_length_is_seen_though_the_time_of_change_was_put_back(tmp_path: Path, data: str) -> None:
    first = content_digest(Path(data), tmp_path / "cache")
    times = Path(data).stat()
    whole = bytearray(Path(data).read_bytes())
    whole[len(whole) // 2] ^= 1
    Path(data).write_bytes(whole)
    os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_digest(Path(data), tmp_path / "cache") != first


@pytest.mark.usefixtures("settled")
def test_a_file_that_another_one_took_the_place_of_is_seen(tmp_path: Path, data: str) -> None:
    first = content_digest(Path(data), tmp_path / "cache")
    other = tmp_path / "other"
    other.write_bytes(bytes(reversed(Path(data).read_bytes())))
    times = Path(data).stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.rename(data)
    assert content_digest(Path(data), tmp_path / "cache") != first


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(tmp_path: Path, data: str) -> None:
    (tmp_path / "cache").write_text("a file")
    assert cache.file_hash(Path(data), tmp_path / "cache") == cache.file_digest(Path(data))


def test_runs_beside_each_other_share_the_workspaces_cache() -> None:
    assert cache_folder(Path("/workspace/runs/demo")) == Path("/workspace/cache")
    assert cache_folder(Path("/elsewhere/demo")) == Path("/elsewhere/demo/cache")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_length": 8}, "data.maxLength is 64, not 8"),
        ({"packing": True}, "data.packing is the default, not true"),
        ({"overlong": Overlong.DROP, "max_length": 6}, "data.overlong is the default, not Drop"),
        ({"train_on": TrainOn.ALL}, "data.trainOn is the default, not All"),
        ({"max_length": 8, "on_broken": OnBroken.DROP}, "data.onBroken is the default, not Drop"),
        ({"max_length": 8, "chat_template": "/w/t.jinja"}, "data.chatTemplate is the default, not /w/t.jinja"),
        (
            {"max_length": 8, "chat_template_kwargs": {"enable_thinking": False}},
            'data.chatTemplateKwargs is the default, not {"enable_thinking": false}',
        ),
    ],
)
def test_other_settings_are_another_dataset_and_are_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = str(write_jsonl(tmp_path / "x.jsonl", [*RECORDS, {"prompt": "ab", "completion": "cd"}]))
    mine, theirs = DataConfig(**{"max_length": 64, "path": path}), DataConfig(**{"max_length": 64, "path": path, **change})
    digests = [dataset_of(tmp_path / "cache", path=path, **settings).digest for settings in ({}, change)]
    assert digests[0] != digests[1]
    first, second = (
        Identity("base", "shapes", digest, 1, 1, sequence_settings(data, None))
        for digest, data in zip(digests, (mine, theirs), strict=True)
    )
    assert named in first.differences(second)
    assert any(line.startswith("the dataset is ") for line in first.differences(second))


def test_other_samples_for_evaluation_are_the_same_dataset(tmp_path: Path, data: str) -> None:
    own = write_jsonl(tmp_path / "own.jsonl", [{"text": "a"}])
    evaluation = EvaluationConfig(1, 0.1, 5, SamplesConfig(str(own)))
    without, first = dataset_of(tmp_path / "cache", path=data), dataset_of(tmp_path / "cache", path=data, evaluation=evaluation)
    write_jsonl(own, [{"text": "a"}, {"text": "b"}])
    second = dataset_of(tmp_path / "cache", path=data, evaluation=evaluation)
    assert (len(first.evaluation), len(second.evaluation)) == (1, 2)
    assert without.digest == first.digest == second.digest
    assert content(without) == content(first) == content(second)


def test_of_a_path_that_is_evaluated_too_the_sum_is_that_of_what_is_trained_on(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / "d").mkdir(exist_ok=True)
        write_jsonl(tmp_path / f"d/{split}.jsonl", [{"text": split}])
    path = str(tmp_path / "d")
    evaluation = EvaluationConfig(1, 0.1, 5, SamplesConfig(path))
    assert dataset_of(tmp_path / "cache", path=path, evaluation=evaluation).files == dataset_of(tmp_path / "cache", path=path).files


def test_other_masks_another_order_and_another_holdout_are_another_dataset(tmp_path: Path) -> None:
    def digest(records: list[dict[str, str]], evaluation: EvaluationConfig | None = None) -> str:
        return dataset_of(tmp_path / "cache", path=str(write_jsonl(tmp_path / "x.jsonl", records)), evaluation=evaluation).digest

    half = [{"prompt": "x", "completion": "yz"}]
    digests = {
        digest(RECORDS),
        digest(RECORDS[::-1]),
        digest([*RECORDS, {"text": "xyz"}]),
        digest([*RECORDS, *half]),
        digest(RECORDS, EvaluationConfig(1, 0.1, 5)),
        digest(RECORDS, EvaluationConfig(1, 0.4, 5)),
    }
    assert len(digests) == 6
    assert digest(RECORDS, EvaluationConfig(1, 0.1, 9)) in digests  # how many are evaluated changes nothing of the training
