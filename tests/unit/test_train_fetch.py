"""Fetching by name, with the hub's own client against a small server of its protocol."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_server import TOKEN, Hub, hub_of_this_process
from lockstep_sizes.modelnames import FETCHED
from lockstep_train.errors import ConfigError, TrainerError
from lockstep_train.fetch import fetch as fetching
from lockstep_train.fetch import folders
from lockstep_train.fetch.choose import model_files, texts_only
from lockstep_train.fetch.fetch import Fetched, fetch, pin_of
from lockstep_train.fetch.hub import DATASETS, HubRepository
from lockstep_train.fetch.progress import Progress

WEIGHTS = {name: os.urandom(300_000) for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")}
INDEX = json.dumps({"weight_map": {f"layer.{number}": name for number, name in enumerate(WEIGHTS)}}).encode()
TINY = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"x" * 10_000,
    "chat_template.jinja": b"{{ messages }}",
    "LICENSE": b"free",
    "model.safetensors.index.json": INDEX,
    **WEIGHTS,
    "README.md": b"about",
    "pytorch_model.bin": b"pickled" * 1000,
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.safetensors": b"again" * 2000,
    "modeling_own.py": b"raise SystemExit",
    "original/params.json": b"{}",
}
NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "LICENSE",
    "model.safetensors.index.json",
    *WEIGHTS,
}
NAME = "org/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_of_this_process(monkeypatch, tmp_path) as hub:
        yield hub


def get(cache: Path, revision: str | None = None, lines: list[str] | None = None, **options: Any) -> Fetched:
    remote, say = HubRepository(NAME), (lines if lines is not None else []).append
    pin = pin_of(remote, revision, cache, say)
    return fetch(remote, pin, cache, say, choose=model_files(NAME), revision=revision, **options)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_fetched_with_what_training_needs_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add(NAME, TINY).revisions["main"]
    fetched = get(tmp_path)
    assert fetched.pin == commit
    assert fetched.folder == tmp_path / "models" / "org--tiny" / commit
    assert names(fetched.folder) == {*NEEDED, FETCHED}
    assert all((fetched.folder / name).read_bytes() == TINY[name] for name in NEEDED)


def test_a_second_start_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add(NAME, TINY).revisions["main"]
    get(tmp_path)
    hub.requests.clear()
    assert get(tmp_path, commit).pin == commit
    assert hub.requests == []


def test_offline_a_branch_is_the_commit_that_was_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add(NAME, TINY).revisions["main"]
    get(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert get(tmp_path).pin == commit
    assert hub.requests == []
    with pytest.raises(
        ConfigError, match=r"org/tiny at v2 is not in .*models, and HF_HUB_OFFLINE is set; fetch it with: lockstep model get"
    ):
        get(tmp_path, "v2")


def test_what_was_fetched_by_its_commit_counts_for_a_branch_that_was_resolved_to_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(NAME, TINY).revisions["main"]
    get(tmp_path, commit)
    get(tmp_path, "main")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert get(tmp_path, "main").pin == commit


def test_without_a_network_a_branch_is_the_commit_that_was_fetched_and_a_line_says_so(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(NAME, TINY).revisions["main"]
    get(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    lines: list[str] = []
    assert get(tmp_path, lines=lines).pin == commit
    assert any(f"as it was when it was fetched: {commit}" in line for line in lines)


def test_a_branch_that_has_moved_is_another_folder_and_the_old_one_stays(hub: Hub, tmp_path: Path) -> None:
    repository = hub.add(NAME, TINY)
    old = get(tmp_path)
    new_commit = repository.commit({**TINY, "config.json": b'{"model_type": "qwen3"}'})
    assert get(tmp_path, old.pin).folder == old.folder
    new = get(tmp_path)
    assert new.pin == new_commit
    assert (new.folder / "config.json").read_bytes() != (old.folder / "config.json").read_bytes()


def test_a_fetch_that_was_killed_goes_on_at_the_byte(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, TINY)
    heavy = next(iter(WEIGHTS))

    def killed(self: Any, file: Any, part: Path) -> None:
        if file.path == heavy:
            part.write_bytes(WEIGHTS[heavy][:200_000])
            raise KeyboardInterrupt
        real(self, file, part)

    real = fetching.Transfer._read
    monkeypatch.setattr(fetching.Transfer, "_read", killed)
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path)
    assert not [path for path in (tmp_path / "models/org--tiny").iterdir() if path.is_dir() and not path.name.startswith(".")]
    monkeypatch.setattr(fetching.Transfer, "_read", real)
    hub.sent.clear()
    fetched = get(tmp_path)
    assert (fetched.folder / heavy).read_bytes() == WEIGHTS[heavy]
    assert hub.sent[heavy] == 100_000
    assert not any(path.name.endswith(".partial") for path in fetched.folder.parent.iterdir())


@pytest.mark.parametrize("fault", ["cut", "throttled", "server error"])
def test_what_a_network_does_now_and_then_costs_no_fetch(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add(NAME, TINY)
    heavy = next(iter(WEIGHTS))
    if fault == "cut":
        hub.faults.cuts[heavy] = [100_000]
    else:
        hub.faults.statuses[heavy] = [429] if fault == "throttled" else [503, 502]
        hub.faults.statuses["/tree/"] = [500]
    fetched = get(tmp_path)
    assert (fetched.folder / heavy).read_bytes() == WEIGHTS[heavy]
    assert hub.sent[heavy] <= 300_000 + 1000, "what had come was kept"


def test_a_wrong_byte_is_fetched_again_and_a_mirror_that_changes_bytes_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, TINY)
    heavy = next(iter(WEIGHTS))
    hub.faults.wrong = {heavy: 2, "config.json": 1}
    with pytest.raises(TrainerError, match=f"{heavy} of org/tiny has not the digest that is published for it, twice in a row") as refused:
        get(tmp_path)
    assert refused.value.exit_code == 1
    assert not [path for path in (tmp_path / "models/org--tiny").iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert (get(tmp_path).folder / heavy).read_bytes() == WEIGHTS[heavy]


def test_a_folder_that_lost_a_file_is_made_whole_again(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, TINY)
    fetched = get(tmp_path)
    heavy, other = WEIGHTS
    (fetched.folder / heavy).unlink()
    hub.sent.clear()
    assert (get(tmp_path, fetched.pin).folder / heavy).read_bytes() == WEIGHTS[heavy]
    assert other not in hub.sent


@pytest.mark.parametrize(
    ("name", "revision", "options", "token", "words"),
    [
        ("org/none", None, {}, TOKEN, r"has no model org/none; check the name \(org/name\), and that a folder's path starts with /"),
        (
            "org/none",
            None,
            {},
            None,
            r"does not show the model org/none \(401\): there is none of this name, or it is private and no token was given",
        ),
        (NAME, "v9", {}, None, "the model org/tiny at http.* has no revision v9; name a branch, a tag or a commit of it"),
        (NAME, None, {"gated": True}, None, "is gated and no token was given: ask for access on its page there, and give a token"),
        (NAME, None, {"gated": True}, "hf_somebodyelse", "is gated and the token's account has no access to it"),
        (NAME, None, {"private": True}, "hf_somebodyelse", "has no model org/tiny"),
        ("a--b/c", None, {}, None, "a--b/c is no name of the hub"),
    ],
)
def test_what_only_a_person_can_mend_is_one_sentence_and_final(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    revision: str | None,
    options: dict[str, Any],
    token: str | None,
    words: str,
) -> None:
    hub.add(NAME, TINY, **options)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    remote = HubRepository(name)
    with pytest.raises(ConfigError, match=words) as refused:
        fetch(remote, pin_of(remote, revision, tmp_path, print), tmp_path, print, choose=model_files(name))
    assert "\n" not in str(refused.value)
    assert token is None or token not in str(refused.value)


def test_a_gated_model_comes_with_its_token_which_no_other_host_and_no_file_gets(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, TINY, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetched = get(tmp_path)
    assert TOKEN in hub.tokens
    assert all(TOKEN.encode() not in (fetched.folder / name).read_bytes() for name in names(fetched.folder))


def test_no_network_is_no_final_failure(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TrainerError, match=r"can't be asked for the model org/tiny: ConnectError.*lockstep model get") as refused:
        get(tmp_path)
    assert refused.value.exit_code == 1


def test_a_volume_without_room_is_refused_before_anything_is_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, TINY)
    monkeypatch.setattr(fetching, "free_bytes", lambda folder: 20_000_000)
    words = r"org/tiny needs 0\.1 GB more in .*org--tiny, and 20\.0 MB are free there; free 47\.7 MB, or take a larger claim"
    with pytest.raises(TrainerError, match=words) as refused:
        get(tmp_path)
    assert refused.value.exit_code == 1
    assert not set(hub.sent) & set(WEIGHTS)


def test_a_volume_that_fills_up_meanwhile_keeps_what_is_there_and_is_no_final_failure(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, TINY)
    real = fetching.Counted.write

    def full(self: Any, data: bytes) -> int:
        if self._file.name.endswith("00002-of-00002.safetensors.part"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        return real(self, data)

    monkeypatch.setattr(fetching.Counted, "write", full)
    with pytest.raises(
        TrainerError, match="can't be written: No space left on device; free room on the volume, or take a larger claim"
    ) as refused:
        get(tmp_path)
    assert refused.value.exit_code == 1
    partial = next((tmp_path / "models/org--tiny").glob(".*.partial"))
    whole = {name for name in names(partial) if not name.endswith(".part")}
    assert "model.safetensors.index.json" in whole
    monkeypatch.setattr(fetching.Counted, "write", real)
    hub.sent.clear()
    get(tmp_path)
    assert not whole & set(hub.sent)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"p"}, "has its weights as pickle files only"),
        ({"config.json": b"{}"}, "has no weights: neither model.safetensors nor model.safetensors.index.json"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, r"is an adapter, not a model: name its base model"),
        ({"model-q4.gguf": b"g"}, r"has no config.json, so it is no model that transformers can load \(its files: .gguf\)"),
        ({"config.json": b"{}", "model.safetensors.index.json": INDEX}, "has no model-00001-of-00002.safetensors, which its .* names"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"<html>"}, "is no index of weight files"),
    ],
)
def test_a_repository_that_is_no_model_of_safetensors_is_refused(hub: Hub, tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    hub.add(NAME, files)
    with pytest.raises(ConfigError, match=words):
        get(tmp_path)


def test_the_tokenizer_can_be_had_without_the_weights(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add(NAME, TINY).revisions["main"]
    fetched = fetch(HubRepository(NAME), commit, tmp_path, print, choose=texts_only(NAME), part="-texts")
    assert names(fetched.folder) == {*NEEDED, FETCHED} - {*WEIGHTS, "model.safetensors.index.json"}
    assert names(get(tmp_path).folder) == {*NEEDED, FETCHED}


def test_a_dataset_comes_whole_and_apart_from_models_of_its_name(hub: Hub, tmp_path: Path) -> None:
    files = {"README.md": b"d", "data/train-00000.parquet": b"P" * 5000}
    hub.add("org/rows", files, kind=DATASETS)
    remote = HubRepository("org/rows", DATASETS)
    fetched = fetch(remote, pin_of(remote, None, tmp_path, print), tmp_path, print)
    assert names(fetched.folder) == {*files, FETCHED}
    assert fetched.folder.parent == tmp_path / "datasets" / "org--rows"


def test_a_folder_of_ones_own_is_filled_once_and_somebody_elses_is_left_alone(hub: Hub, tmp_path: Path) -> None:
    repository = hub.add(NAME, TINY)
    there = get(tmp_path, to=tmp_path / "mine").folder
    assert names(there) == {*NEEDED, FETCHED}
    repository.commit({**TINY, "config.json": b"{ }"})
    with pytest.raises(ConfigError, match=r"mine holds org/tiny at .*, not org/tiny at .*; name another folder"):
        get(tmp_path, to=tmp_path / "mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("work")
    with pytest.raises(ConfigError, match="other holds files that were not fetched by Lockstep"):
        get(tmp_path, to=tmp_path / "other")
    assert (tmp_path / "other" / "thesis.txt").read_text() == "work"


def test_who_comes_while_another_fetches_waits_and_then_asks_for_nothing(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add(NAME, TINY).revisions["main"]
    lines: list[str] = []
    target = folders.target_in(tmp_path, "models", NAME, commit)
    with folders.one_at_a_time(target, print):
        other = threading.Thread(target=lambda: get(tmp_path, commit, lines))
        other.start()
        while not lines:
            assert other.is_alive()
        assert lines == [f"Another process fetches {target.folder}; waiting for it"]
        assert not target.folder.exists()
    other.join()
    assert target.folder.is_dir()


def test_progress_is_told_only_while_bytes_come() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress("org/tiny", 100_000_000_000, 4, lines.append, lambda: now[0])
    progress.present(20_000_000_000)
    now[0] = 10.0
    progress.tell()
    assert lines == []
    progress.moved(4_000_000_000)
    progress.done()
    progress.tell()
    assert lines == ["Fetching org/tiny: 24.0 GB of 100.0 GB, 1 of 4 files, 400 MB/s, about 3 min left"]
    now[0] = 30.0
    progress.moved(1)
    progress.tell()
    now[0] = 50.0
    progress.tell()
    assert len(lines) == 2


def test_the_digest_of_a_small_file_is_gits(tmp_path: Path) -> None:
    from lockstep_train.fetch.remote import git_digest, matches

    (tmp_path / "a").write_bytes(b"hello\n")
    assert git_digest(tmp_path / "a") == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert matches("sha256:" + hashlib.sha256(b"hello\n").hexdigest(), tmp_path / "a")


@pytest.mark.parametrize("path", ["../outside.json", "/etc/x.json", "a/../../b.json", "a.part"])
def test_no_path_of_a_listing_leads_out_of_the_folder(hub: Hub, tmp_path: Path, path: str) -> None:
    hub.add("org/rows", {"ok.json": b"{}", path: b"{}"}, kind=DATASETS)
    remote = HubRepository("org/rows", DATASETS)
    with pytest.raises(ConfigError, match="which can't be kept in a folder"):
        fetch(remote, pin_of(remote, None, tmp_path / "cache", print), tmp_path / "cache", print)
    assert {place.name for place in tmp_path.iterdir()} == {"cache"}


def test_an_adapter_of_a_hubs_model_finds_it_in_the_cache_above(hub: Hub, tmp_path: Path) -> None:
    from lockstep_train.generate import base_of

    adapter = tmp_path / "runs/x/adapter"
    adapter.mkdir(parents=True)
    commit = hub.add(NAME, TINY).revisions["main"]
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": NAME, "revision": commit}))
    with pytest.raises(
        ConfigError, match=f"is in no cache above it; fetch it with: lockstep model get org/tiny --revision {commit}, and name"
    ):
        base_of(adapter)
    folder = get(tmp_path / "cache").folder
    assert base_of(adapter) == folder
