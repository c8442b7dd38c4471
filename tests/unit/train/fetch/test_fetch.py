"""Fetching by name, with the hub's own client against a small server of its protocol."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_spec.modelnames import FETCHED
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.base.runfile import Origin, parse_run
from lockstep_train.fetch import fetch as fetching
from lockstep_train.fetch import folders
from lockstep_train.fetch import hub as hubs
from lockstep_train.fetch.fetch import Fetched, FetchProgress, fetch, pin_of
from lockstep_train.fetch.hub import DATASETS, HubRepository
from lockstep_train.fetch.model import model_files, texts_only
from lockstep_train.fetch.remote import MayPass, RemoteFile, git_digest, matches
from lockstep_train.generate import base_of
from lockstep_train.model.fetched import TEXTS, with_base_name
from support.hub_server import TOKEN, Hub, hub_of_this_process
from unit.train.test_config import TRAINING
from unit.virtual_time import VirtualClock

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
    with pytest.raises(TrainerError, match=f"{heavy} of org/tiny does not match its published digest, twice in a row") as refused:
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
        ("a--b/c", None, {}, None, "a--b/c is not a valid hub name"),
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


def test_no_network_is_no_final_failure_after_six_attempts(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    pauses: list[float] = []
    monkeypatch.setattr(fetching.time, "sleep", pauses.append)
    with pytest.raises(TrainerError, match=r"can't be asked for the model org/tiny: ConnectError.*lockstep model get") as refused:
        get(tmp_path)
    assert (refused.value.exit_code, len(pauses)) == (1, 5)


def test_a_question_is_asked_again_after_one_second_and_then_twice_as_long_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(fetching.time, "sleep", waits.append)

    def ask() -> None:
        raise MayPass("away")

    with pytest.raises(MayPass):
        fetching._with_patience(ask, print)
    assert waits == [1, 2, 4, 8, 16]


def test_a_volume_without_room_is_refused_before_anything_is_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, TINY)
    monkeypatch.setattr(fetching, "free_bytes", lambda folder: 20_000_000)
    words = r"org/tiny needs 67\.7 MB more in .*org--tiny, and 20\.0 MB are free there; free 47\.7 MB or use a larger claim"
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
        TrainerError, match="can't be written: No space left on device; free space on the volume or use a larger claim"
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
        ({"config.json": b"{}", "pytorch_model.bin": b"p"}, "has its weights only as pickle files"),
        ({"config.json": b"{}"}, "has no weights: neither model.safetensors nor model.safetensors.index.json"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, r"is an adapter, not a model: name its base model"),
        ({"model-q4.gguf": b"g"}, r"has no config.json, so transformers can't load it as a model \(its files: .gguf\)"),
        ({"config.json": b"{}", "model.safetensors.index.json": INDEX}, "has no model-00001-of-00002.safetensors, which its .* names"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"<html>"}, "is not an index of weight files"),
        (
            {
                "config.json": b"{}",
                "pytorch_model.bin": b"p",
                "model.safetensors.index.json": b'{"weight_map": {"a": "pytorch_model.bin"}}',
            },
            "model.safetensors.index.json of org/tiny names pytorch_model.bin, which is not a safetensors file",
        ),
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


def test_who_waits_for_another_process_looks_twice_a_second_and_says_so_every_half_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks, lines = VirtualClock(), list[float](), list[float]()
    monkeypatch.setattr(folders, "time", clock)
    monkeypatch.setattr(folders, "_locked", lambda _: looks.append(clock.now - 1000) or clock.now >= 1070)
    with folders.one_at_a_time(folders.Target(tmp_path / "mine"), lambda _: lines.append(clock.now - 1000)):
        assert lines == [0, 30, 60]
        assert looks == [number / 2 for number in range(141)]


def test_how_far_a_fetch_is_is_looked_at_every_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = VirtualClock(0.0), list[float]()
    progress = partial(FetchProgress, clock=clock.monotonic)
    monkeypatch.setattr(fetching, "FetchProgress", progress)
    transfer = fetching.Transfer(tmp_path, HubRepository(NAME), "", lambda _: told.append(clock.now))

    def waited(waiting: set[Any], seconds: float, _: str) -> tuple[set[Any], set[Any]]:
        clock.sleep(seconds)
        transfer._progress.moved(1_000_000)
        return set(), waiting if clock.now < 100 else set()

    monkeypatch.setattr(fetching, "wait", waited)
    monkeypatch.setattr(transfer, "bring", lambda file: tmp_path)
    transfer.bring_all([RemoteFile("a", 1_000_000_000, "")])
    assert told == [5, 35, 65, 95]


def test_progress_is_told_only_while_bytes_come() -> None:
    now, lines = [0.0], list[str]()
    progress = FetchProgress("org/tiny", 100_000_000_000, 4, lines.append, lambda: now[0])
    progress.present(20_000_000_000)
    now[0] = 10.0
    progress.tell()
    assert lines == []
    progress.moved(4_000_000_000)
    progress.done()
    progress.tell()
    assert lines == ["Fetching org/tiny: 24.0 GB of 100.0 GB, 1 of 4 files, 400 MB/s, about 3m10s left"]
    now[0] = 30.0
    progress.moved(1)
    progress.tell()
    now[0] = 50.0
    progress.tell()
    assert len(lines) == 2


def test_the_digest_of_a_small_file_is_gits(tmp_path: Path) -> None:
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
    adapter = tmp_path / "runs/x/adapter"
    adapter.mkdir(parents=True)
    commit = hub.add(NAME, TINY).revisions["main"]
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": NAME, "revision": commit}))
    with pytest.raises(
        ConfigError, match=f"is in no cache above it; fetch it with: lockstep model get org/tiny --revision {commit}, and name"
    ):
        base_of(adapter)
    fetch(HubRepository(NAME), commit, tmp_path / "cache", print, choose=texts_only(NAME), part=TEXTS)
    for revision in (None, "main", commit):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": NAME, "revision": revision}))
        with pytest.raises(ConfigError, match="is in no cache above it"):
            base_of(adapter)  # (a folder without the weights is none)
    folder = get(tmp_path / "cache", "main").folder
    for revision in (None, "main", commit):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": NAME, "revision": revision}))
        assert base_of(adapter) == folder


def test_an_adapter_of_a_folder_finds_it_by_the_job_s_name_for_it_above_itself(tmp_path: Path) -> None:
    adapter, model = tmp_path / "workspace/runs/x/adapter", tmp_path / "datasets/models/tiny"
    for folder in (adapter, model):
        folder.mkdir(parents=True)
    own = tmp_path / "workspace/models/own"
    own.mkdir(parents=True)
    for stated, found in (
        ("/datasets/models/tiny", model),
        ("/workspace/models/own", own),
        (str(model), model),
        ("/workspace/other", Path("/workspace/other")),
        ("/no-such-model", Path("/no-such-model")),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": stated}))
        assert base_of(adapter) == found


@pytest.mark.parametrize(
    ("stated", "origin", "expected"),
    [
        ("/workspace/models/tiny", None, {"base_model_name_or_path": "/workspace/models/tiny"}),
        ("", None, {"base_model_name_or_path": "/home/ada/w/m"}),
        ("org/tiny", Origin("org/tiny", None, "c0ffee"), {"base_model_name_or_path": "org/tiny", "revision": "c0ffee"}),
        ("s3://bucket/m", Origin("s3://bucket/m", None, "9"), {"base_model_name_or_path": "/home/ada/w/m"}),
    ],
)
def test_an_adapter_names_its_base_as_the_hub_or_the_job_does(stated: str, origin: Origin | None, expected: dict[str, str]) -> None:
    config = replace(
        parse_run({"job": {"name": "x"}, "runDir": "/r", "training": TRAINING, "baseModel": stated}, "run.json"), origin=origin
    )
    described = with_base_name({"method": "LoRA", "config": {"base_model_name_or_path": "/home/ada/w/m"}}, config)
    assert described["config"] == expected
    assert with_base_name({"method": "Full", "config": None}, config)["config"] is None


def test_a_branch_that_moves_while_a_folder_is_filled_begins_it_anew(hub: Hub, tmp_path: Path) -> None:
    last = list(WEIGHTS)[-1]
    repository = hub.add(NAME, TINY)
    hub.faults.statuses[last] = [503] * 6
    with pytest.raises(TrainerError, match="it answers 503"):
        get(tmp_path, to=tmp_path / "mine")
    hub.faults.statuses.clear()
    moved = {name: bytes(reversed(content)) for name, content in TINY.items() if name in WEIGHTS} | {
        "config.json": TINY["config.json"],
        "model.safetensors.index.json": INDEX,
    }
    commit = repository.commit(moved)
    folder = get(tmp_path, to=tmp_path / "mine").folder
    assert {name: (folder / name).read_bytes() for name in names(folder) - {FETCHED}} == moved
    assert json.loads((folder / FETCHED).read_bytes())["pin"] == commit
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.lock", "mine"], "nothing is left of the other commit"


def test_a_damaged_folder_of_one_model_never_becomes_another(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, TINY)
    folder = get(tmp_path, to=tmp_path / "mine").folder
    commit = hub.add("org/other", {**TINY, "generation_config.json": b"[]"}).revisions["main"]
    (folder / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"mine holds org/tiny at .*, not org/other at .*, and files of it are missing; name another folder"
    ):
        fetch(HubRepository("org/other"), commit, tmp_path, print, choose=model_files("org/other"), to=folder)
    (folder / FETCHED).write_bytes(b"{")
    with pytest.raises(ConfigError, match="mine holds something at an unknown commit"):
        get(tmp_path, to=folder)
    (folder / FETCHED).unlink()
    assert names(folder) == NEEDED - {"config.json"}


def test_a_folder_is_filled_though_somebody_has_made_an_empty_one_meanwhile(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, TINY)
    hub.faults.statuses["model-00001"] = [503] * 6
    with pytest.raises(TrainerError, match="it answers 503"):
        get(tmp_path, to=tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    assert names(get(tmp_path, to=tmp_path / "mine").folder) == {*NEEDED, FETCHED}


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(folders.fcntl, "flock", refuse)


def once(patch: pytest.MonkeyPatch, method: str, act: Callable[[], Any]) -> None:
    """Have `act` happen when the first process calls this of the weights' remote, before it goes on."""
    real, done = getattr(HubRepository, method), threading.Lock()

    def patched(self: HubRepository, *arguments: Any) -> Any:
        file = arguments[0] if method != "files" else None
        if (file is None or file.path in WEIGHTS) and done.acquire(blocking=False):
            act()
        return real(self, *arguments)

    patch.setattr(HubRepository, method, patched)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("moment", ["files", "read", "is_intact"])
def test_without_locks_a_process_that_is_overtaken_takes_what_the_other_has_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    hub.add(NAME, TINY)
    faster: list[Fetched] = []
    once(monkeypatch, moment, lambda: faster.append(get(tmp_path)))
    lines: list[str] = []
    assert [get(tmp_path, lines=lines)] == faster
    assert f"Another process has fetched {faster[0].folder}" in lines
    assert names(faster[0].folder) == {*NEEDED, FETCHED}
    assert all((faster[0].folder / name).read_bytes() == TINY[name] for name in NEEDED)
    assert not list(faster[0].folder.parent.glob(".*.partial"))


@pytest.mark.usefixtures("no_locks")
def test_without_locks_each_process_writes_files_of_its_own_and_only_abandoned_ones_are_taken_over(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add(NAME, TINY).revisions["main"]
    partial = tmp_path / "models" / "org--tiny" / f".{commit}.partial"
    partial.mkdir(parents=True)
    abandoned, written = WEIGHTS
    for name in WEIGHTS:
        (partial / f"{name}.{'0' * 16}.part").write_bytes(WEIGHTS[name][:200_000])
    for name, age in ((abandoned, 610), (written, 590)):
        os.utime(partial / f"{name}.{'0' * 16}.part", (partial.stat().st_mtime - age,) * 2)
    folder = get(tmp_path).folder
    assert (hub.sent[abandoned], hub.sent[written]) == (100_000, 300_000)
    assert names(folder) == {*NEEDED, FETCHED}


def test_a_lock_that_holds_on_one_node_only_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = folders.Target(tmp_path / "mine")
    with folders.one_at_a_time(target, print) as suffix:
        assert suffix == ".part"
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(f"36 35 {os.major(device)}:{os.minor(device)} / /workspace rw - nfs server:/ rw,vers=3,nolock,local_lock=all\n")
    monkeypatch.setattr(folders, "MOUNTS", mounts)
    with folders.one_at_a_time(target, print) as suffix:
        assert len(suffix) > len(".part")


@pytest.mark.parametrize("fault", ["longer", "removed"])
def test_what_another_process_does_to_files_that_are_checked_is_no_final_failure_and_never_whole(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    hub.add(NAME, TINY)
    first = next(iter(WEIGHTS))

    def tamper(self: fetching.Transfer, files: Any) -> None:
        real(self, files)
        if fault == "longer":
            with (self._folder / first).open("ab") as file:
                file.write(b"x")
        else:
            shutil.rmtree(self._folder)

    real = fetching.Transfer.bring_all
    monkeypatch.setattr(fetching.Transfer, "bring_all", tamper)
    with pytest.raises(TrainerError, match="only one process fetches into a volume whose locks don't work") as refused:
        get(tmp_path)
    assert refused.value.exit_code == 1
    monkeypatch.setattr(fetching.Transfer, "bring_all", real)
    assert (get(tmp_path).folder / first).read_bytes() == WEIGHTS[first]


@pytest.mark.parametrize("page", [b"<html>log in</html>" * 10, b"<html>log in</html>" * 100_000])
def test_a_server_that_sends_more_than_was_published_is_not_asked_for_ever(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: bytes
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 5)
    hub.add(NAME, TINY)
    hub.faults.pages["config.json"] = page
    with pytest.raises(
        TrainerError, match=r"org/tiny sends more of config.json than the 23 bytes .*; a proxy may answer in its place"
    ) as refused:
        get(tmp_path)
    assert refused.value.exit_code == 1
    assert sum(request.endswith("/config.json") for request in hub.requests) == 6
    del hub.faults.pages["config.json"]
    assert get(tmp_path).folder.is_dir()


def test_a_server_that_has_less_than_was_published_is_not_asked_for_ever(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, TINY)
    hub.faults.pages["config.json"] = b"{}"
    with pytest.raises(TrainerError, match=r"config\.json of org/tiny ended after 2 of 23 bytes|it answers 416") as refused:
        get(tmp_path)
    assert refused.value.exit_code == 1


@pytest.mark.parametrize("fault", ["no such range", "no ranges at all"])
def test_a_part_that_the_server_cannot_go_on_with_is_begun_anew(hub: Hub, tmp_path: Path, fault: str) -> None:
    commit = hub.add(NAME, TINY).revisions["main"]
    heavy = next(iter(WEIGHTS))
    part = tmp_path / "models" / "org--tiny" / f".{commit}.partial" / f"{heavy}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(WEIGHTS[heavy][:100_000])
    if fault == "no such range":
        hub.faults.statuses[heavy] = [416]
    hub.faults.ranges = fault == "no such range"
    assert (get(tmp_path).folder / heavy).read_bytes() == WEIGHTS[heavy]
    assert hub.sent[heavy] == 300_000


@pytest.mark.parametrize(
    "ask", [lambda remote: remote.resolve(None), lambda remote: remote.resolve("main"), lambda remote: remote.files("0" * 40)]
)
def test_a_server_that_says_nothing_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch, ask: Callable[[HubRepository], Any]) -> None:
    monkeypatch.setitem(hubs.LIMITS_SECONDS, "read", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(MayPass, match="can't be asked for the model org/tiny: ReadTimeout"):
            ask(HubRepository(NAME))


@pytest.mark.parametrize("storage", ["of the hub's host", "of another host"])
def test_a_refusal_of_the_hubs_storage_is_no_word_on_the_name_or_the_token(hub: Hub, tmp_path: Path, storage: str) -> None:
    hub.add(NAME, TINY)
    if storage == "of another host":
        hub.storage = hub.endpoint.replace("127.0.0.1", "localhost")
    hub.faults.statuses["/cdn/"] = [403, 401, 404]
    assert get(tmp_path / "once").folder.is_dir()
    hub.faults.statuses["/cdn/"] = [403] * 100
    with pytest.raises(
        TrainerError, match=r"the hub's storage \S+ answers 403 when asked for \S+ of the model org/tiny; what has arrived is kept"
    ) as refused:
        get(tmp_path / "always")
    assert refused.value.exit_code == 1
    assert "signature" not in str(refused.value)


def test_a_file_of_any_size_is_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 50_000)  # stands for the client's 50 GB
    hub.add(NAME, TINY)
    assert names(get(tmp_path).folder) == {*NEEDED, FETCHED}


def test_a_folder_that_was_fetched_and_then_published_is_whole_without_the_record_that_came_with_it(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add(NAME, {**TINY, FETCHED: b'{"name": "org/origin", "pin": "0", "files": {}}'}).revisions["main"]
    assert names(get(tmp_path).folder) == {*NEEDED, FETCHED}
    hub.requests.clear()
    assert get(tmp_path, commit).pin == commit
    assert hub.requests == []


def test_a_volume_that_does_not_say_what_is_free_is_not_full(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, TINY)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((512, 512, 0, 0, 0, 0, 0, 0, 0, 255)))
    assert names(get(tmp_path).folder) == {*NEEDED, FETCHED}


@pytest.mark.parametrize(("asked", "waited"), [("7", 7.0), ("100000", 300.0), ("", 30.0)])
@pytest.mark.parametrize("where", ["/api/models/org/tiny", "/tree/", "config.json"])
def test_a_hub_that_is_asked_too_often_is_left_alone_for_as_long_as_it_says(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, asked: str, waited: float
) -> None:
    waits: list[float] = []
    real = fetching._wait_after
    monkeypatch.setattr(fetching, "_wait_after", lambda *arguments: waits.append(real(*arguments)) or 0.0)
    hub.add(NAME, TINY)
    hub.faults.retry_after = asked
    hub.faults.statuses[where] = [429]
    assert names(get(tmp_path).folder) == {*NEEDED, FETCHED}
    assert waits == [waited]


@pytest.mark.parametrize("status", [408, 416, 429, 500, 503])
def test_what_a_hub_answers_that_may_pass_is_no_final_failure(status: int) -> None:
    error = OSError("…")
    error.response = SimpleNamespace(status_code=status, headers={})  # type: ignore[attr-defined]
    assert isinstance(HubRepository(NAME).problem(error, None), MayPass)


def test_a_hub_that_is_asked_too_often_holds_up_no_model_that_is_there(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, TINY)
    folder = get(tmp_path).folder
    waits: list[float] = []
    monkeypatch.setattr(fetching.time, "sleep", waits.append)
    hub.faults.retry_after = "100000"
    hub.faults.statuses["/api/"] = [429] * 2
    assert get(tmp_path).folder == folder
    assert waits == [10.0]


def test_how_a_dataset_gets_its_token_is_said_without_a_model(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/rows", {"a.jsonl": b"{}"}, kind=DATASETS, gated=True).revisions["main"]
    words = (
        r"the dataset org/rows at .* is gated and no token was given: .* a Secret that HF_TOKEN of spec.env takes it from \(valueFrom\), or"
    )
    with pytest.raises(ConfigError, match=words):
        fetch(HubRepository("org/rows", DATASETS), commit, tmp_path, print)


@pytest.mark.parametrize("status", [None, 404, 403, 503])
def test_the_password_of_a_mirror_is_in_no_message(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint.replace("//", "//bob:PASS/WORD@" if status is None else "//bob:PASSWORD@"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.faults.statuses["/api/"] = [status or 404] * 10
    lines: list[str] = []
    with pytest.raises(TrainerError) as refused:
        get(tmp_path, lines=lines)
    text = "\n".join([str(refused.value), *lines])
    assert not any(word in text for word in ("bob", "PASS", "WORD", TOKEN))
    assert "HF_ENDPOINT is not a valid address" in text if status is None else f"{hub.endpoint} " in text


@pytest.mark.usefixtures("no_locks")
def test_without_locks_nothing_is_fetched_a_second_time_once_another_process_has_all(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, TINY)
    real, done = fetching.prepare_partial, threading.Lock()

    def overtaken(*arguments: Any) -> None:
        real(*arguments)
        if done.acquire(blocking=False):
            get(tmp_path)

    monkeypatch.setattr(fetching, "prepare_partial", overtaken)
    assert names(get(tmp_path).folder) == {*NEEDED, FETCHED}
    assert all(hub.sent[name] == len(TINY[name]) for name in NEEDED)


def test_a_listing_that_goes_on_at_another_server_ends_before_that_gets_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(url: str, headers: dict[str, str]) -> SimpleNamespace:
        asked.append(url)
        return SimpleNamespace(json=list, links={"next": {"url": "http://evil.example/more"}})

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hubs, "prepared_session", lambda: SimpleNamespace(get=get))
    monkeypatch.setattr("huggingface_hub.utils.hf_raise_for_status", lambda response: None)
    with pytest.raises(ConfigError, match=r"leads to another server for the rest of its files: evil\.example"):
        HubRepository("org/tiny").files("a" * 40)
    assert len(asked) == 1
