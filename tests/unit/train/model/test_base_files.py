"""The base model is what it was, to the byte: over attempts, between nodes, and while it is loaded."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep_gang.contract.layout import RankLayout
from lockstep_spec.codec import from_json, to_json
from lockstep_train.base import cache
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.base.limits import UNWATCHED
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.model import base_files
from lockstep_train.model.base_files import BaseHash, adapter_record, hash_base, refuse_other_base
from lockstep_train.model.load import base_digest

SAMPLED_BYTES = 1 << 16

COMMIT = "runs/x/checkpoints/step-4.a1"
REMEDY = "put the recorded files back, or set training.checkpoint.resumeFrom to None to train anew on these"
WEIGHTS = {f"model-0000{part}-of-00003.safetensors": bytes([part]) * 60_000 for part in (1, 2, 3)}
FILES = {
    **WEIGHTS,
    "model.safetensors.index.json": json.dumps({"weight_map": {name: name for name in WEIGHTS}}).encode(),
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
}


def make_model(folder: Path) -> Path:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("of no matter")
    return folder


def flip(path: Path, *, put_time_back: bool = True) -> None:
    """Change 4,000 bytes in the middle; the size stays, and mtime is what it was."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    middle, count = len(content) // 2, min(4000, len(content) // 2)
    content[middle : middle + count] = bytes(byte ^ 0xFF for byte in content[middle : middle + count])
    path.write_bytes(content)
    if put_time_back:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def finished(
    folders: list[Path], recorded: dict[str, str] | None = None, counts: tuple[int, ...] | None = None
) -> list[dict[str, str] | TrainerError]:
    """What each rank of these nodes ends with; each node has a folder, which may be another's. `counts`: ranks of each node, two where not
    given.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    layout = RankLayout(counts or (2,) * len(folders))
    world = layout.world_size

    def rank(index: int) -> dict[str, str] | TrainerError:
        node, local = layout.node_of(index), layout.local_rank_of(index)
        ranks = Ranks(index, world, local, layout.counts[node], node, len(folders), torch.device("cpu"), store)
        try:
            begun = BaseHash(ranks, folders[node], folders[node].parent / "cache")
            return dict(begun.finish(recorded or {}, COMMIT, UNWATCHED))
        except TrainerError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was read whole; none counts as just written."""
    counted: Counter[str] = Counter()
    real = cache.file_digest
    monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(cache, "file_digest", lambda path: (counted.update([str(path)]), real(path))[1])
    return counted


def test_each_file_is_read_once_by_all_nodes_together_and_not_again_at_the_next_start(tmp_path: Path, reads: Counter[str]) -> None:
    model = make_model(tmp_path / "model")
    first = finished([model, model, model])
    assert first == [hash_base(model)] * 6
    reads.clear()
    (tmp_path / "cache" / "files").rename(tmp_path / "other")
    assert finished([model, model, model]) == first
    assert reads == Counter(dict.fromkeys([str(model / name) for name in FILES], 1))
    reads.clear()
    assert finished([model, model]) == first[:4]
    assert not reads


@pytest.mark.parametrize("counts", [(3, 1, 2), (1, 4), (5, 1)])
def test_nodes_with_unlike_numbers_of_ranks_read_each_file_once(tmp_path: Path, reads: Counter[str], counts: tuple[int, ...]) -> None:
    model = make_model(tmp_path / "model")
    assert finished([model] * len(counts), counts=counts) == [hash_base(model)] * sum(counts)
    assert reads == Counter(dict.fromkeys([str(model / name) for name in FILES], 2))  # once by the ranks, once by hash_base


@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize("put_time_back", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_refused_by_its_name_though_size_and_time_are_the_same(name: str, tmp_path: Path, *, put_time_back: bool) -> None:
    model = make_model(tmp_path / "model")
    (recorded,) = finished([model], counts=(1,))
    assert isinstance(recorded, dict)
    if name.endswith("index.json"):
        (model / name).write_text(json.dumps({**json.loads(FILES[name]), "metadata": {}}))
    else:
        flip(model / name, put_time_back=put_time_back)
    answers = finished([model], recorded)
    now = hash_base(model)[name]
    assert [str(answer) for answer in answers] == [
        f"{model} is not the base model that {COMMIT} was trained on: {name} had SHA-256 {recorded[name][:16]}, and now has SHA-256"
        f" {now[:16]}; {REMEDY}"
    ] * 2
    assert all(isinstance(answer, ConfigError) for answer in answers)


def test_another_training_that_changed_only_weights_far_from_both_ends_of_a_file_is_refused(tmp_path: Path) -> None:
    """A merged adapter leaves embeddings and head as they were, and all sizes: what was sampled of a file before every byte was hashed."""
    model = make_model(tmp_path / "model")
    weights = model / "model-00001-of-00003.safetensors"
    weights.write_bytes(bytes(4 * SAMPLED_BYTES))
    recorded, sampled = hash_base(model), base_digest(model)
    content = bytearray(weights.read_bytes())
    content[SAMPLED_BYTES + 1 : 3 * SAMPLED_BYTES - 1] = b"\x01" * (2 * SAMPLED_BYTES - 2)
    weights.write_bytes(content)
    assert base_digest(model) == sampled, "the change is not one that a sample misses"
    with pytest.raises(ConfigError, match=rf"{weights.name} had SHA-256 "):
        refuse_other_base(model, recorded, COMMIT, REMEDY)
    assert all(isinstance(answer, ConfigError) for answer in finished([model], recorded))


def test_a_file_that_is_missing_or_new_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    recorded = hash_base(model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r"chat_template.jinja was not there, and now has SHA-256 \w{16}; put it back"):
        refuse_other_base(model, recorded, COMMIT, "put it back")
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer_config.json had SHA-256 \w{16}, and now is not there; put it back"):
        refuse_other_base(model, recorded, COMMIT, "put it back")
    (model / "README.md").unlink()
    (model / "tokenizer_config.json").write_bytes(FILES["tokenizer_config.json"])
    refuse_other_base(model, recorded, COMMIT, "put it back")


def test_a_node_with_another_copy_is_named(tmp_path: Path) -> None:
    models = []
    for node in range(3):
        (tmp_path / str(node)).mkdir()
        models.append(make_model(tmp_path / str(node) / "model"))
    recorded = hash_base(models[0])
    assert finished(models) == [recorded] * 6
    name = "model-00002-of-00003.safetensors"
    flip(models[1] / name)
    theirs = hash_base(models[1])[name]
    fresh = (
        f"the base model {models[0]} is not the same on all nodes: {name} has SHA-256 {recorded[name][:16]} on nodes 0, 2 and has SHA-256"
        f" {theirs[:16]} on node 1; copy the same files to all of them"
    )
    assert [str(answer) for answer in finished(models)] == [fresh] * 6
    resumed = f"{name} had SHA-256 {recorded[name][:16]}, and now has SHA-256 {theirs[:16]} on node 1; {REMEDY}"
    assert all(str(answer).endswith(resumed) for answer in finished(models, recorded))


def test_a_file_that_changes_while_the_model_is_loaded_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    ranks = Ranks(0, 1, 0, 1, 0, 1, torch.device("cpu"), dist.HashStore())  # type: ignore[attr-defined]
    begun = BaseHash(ranks, model, tmp_path / "cache")
    flip(model / "config.json")
    with pytest.raises(ConfigError, match=r"model/config.json of the base model was changed while it was loaded"):
        begun.finish({}, COMMIT, UNWATCHED)


@pytest.mark.parametrize(
    ("number", "reason", "kind"),
    [
        (errno.EIO, "Input/output error; this may pass, and the next attempt tries it again", TrainerError),
        (errno.EACCES, "Permission denied", ConfigError),
    ],
)
def test_a_file_that_one_rank_cannot_read_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, kind: type[TrainerError]
) -> None:
    model = make_model(tmp_path / "model")
    real = cache.file_hash

    def failing(path: Path, cache: Path | None) -> str:
        if path.name == "tokenizer.json":
            raise OSError(number, os.strerror(number), str(path))
        return real(path, cache)

    monkeypatch.setattr(base_files, "file_hash", failing)
    expected = f"training.model.name: {model / 'tokenizer.json'} can't be read: {reason}"
    assert [(type(answer), str(answer)) for answer in finished([model, model])] == [(kind, expected)] * 4


def identity(base: str, files: dict[str, str], dataset: str = "d", data: dict[str, str] | None = None) -> Identity:
    return Identity(base, "p", dataset, 1, 1, {}, files, data or {})


def test_a_commit_without_hashes_is_compared_by_what_it_recorded() -> None:
    new = identity("sampled", {"config.json": "abc"})
    assert identity("sampled", {}).differences(new) == []
    assert identity("other", {}).differences(new) == ["the base model is other, not sampled"]
    assert identity("other", {"config.json": "abc"}).differences(new) == []  # the hashes were compared before
    stored = to_json(new)
    assert from_json(Identity, stored, "identity") == new
    del stored["baseFiles"], stored["dataFiles"]
    assert from_json(Identity, stored, "identity") == identity("sampled", {})


def test_the_data_file_that_makes_another_dataset_is_named() -> None:
    mine, theirs = identity("b", {}, "1", {"/data/x.jsonl": "abc"}), identity("b", {}, "2", {"/data/x.jsonl": "def"})
    assert "the SHA-256 of /data/x.jsonl is abc, not def" in mine.differences(theirs)
    same = identity("b", {}, "1", {"/data/x.jsonl": "def"})
    assert mine.differences(same) == []  # other bytes that make the same tokens


def test_an_adapter_that_says_nothing_of_its_base_is_taken_as_it_is(tmp_path: Path) -> None:
    assert adapter_record(tmp_path) == {}
    for broken in ("[1]", "[" * 100_000):
        (tmp_path / base_files.RECORD).write_text(broken)
        assert adapter_record(tmp_path) == {}
    (tmp_path / base_files.RECORD).write_text('{"config.json": "abc"}')
    assert adapter_record(tmp_path) == {"config.json": "abc"}
