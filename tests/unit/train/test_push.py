"""Adapters sent to a hub by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from numpy import zeros
from safetensors.numpy import save

from lockstep_train import push
from support.hub_server import READING, TOKEN, Hub, hub_of_this_process

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # the client's own way to send a file
NAME = "team/adapter"
SENT = {
    "adapter_config.json": json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}).encode(),
    "adapter_model.safetensors": save({"a": zeros(3000, "float32")}),
    "base_files.json": b"{}",
    "README.md": b"---\nlibrary_name: peft\n---\n",
    "tokenizer.json": b"{}" * 5000,
    "chat_template.jinja": b"{{ messages }}",
}
KEPT_HERE = {"shard-r00000-of-00002.safetensors": b"optimizer", "train.jsonl": b"row", "tokenizer_rows.jsonl": b"row", ".env": b"secret"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with hub_of_this_process(monkeypatch, tmp_path) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in {**SENT, **KEPT_HERE}.items():
        (folder / name).write_bytes(content)
    (tmp_path / "elsewhere.json").write_text("secret")
    (folder / "vocab.json").symlink_to(tmp_path / "elsewhere.json")
    return folder


def sent(adapter: Path, *options: str) -> int:
    return push.main([str(adapter), NAME, "--send", *options])


def test_the_files_of_an_adapter_arrive_whole_in_a_private_repository_and_no_others(
    hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sent(adapter) == 0
    repository = hub.repositories["models", NAME]
    assert repository.private
    assert repository.commits[repository.revisions["main"]] == SENT
    message = capsys.readouterr()
    assert message.out.startswith(f"Sent 6 files to {NAME}, which is private: {hub.endpoint}/{NAME}/commit/")
    assert TOKEN not in message.out + message.err


def test_a_repository_is_public_only_where_that_is_said(hub: Hub, adapter: Path) -> None:
    assert sent(adapter, "--public") == 0
    assert not hub.repositories["models", NAME].private


def test_an_adapter_does_not_become_public_by_a_repository_that_is(hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = hub.add(NAME, {"old": b""})
    assert sent(adapter) == 78
    assert "is public already: add --public, or name another repository" in capsys.readouterr().err
    assert len(repository.commits) == 1
    assert sent(adapter, "--public") == 0
    assert len(repository.commits) == 2


def test_a_list_says_what_would_be_sent_and_asks_no_hub(hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert push.main([str(adapter), NAME]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"To {NAME} at {hub.endpoint}, private:"
    assert [line.split()[0] for line in lines[1:7]] == sorted(SENT)
    assert "  tokenizer.json             10.0 kB" in lines
    assert lines[8] == "Not sent: .env, shard-r00000-of-00002.safetensors, tokenizer_rows.jsonl, train.jsonl, vocab.json"
    assert hub.requests == []


@pytest.mark.parametrize(
    ("token", "part", "status", "code", "says"),
    [
        ("hf_wrong", "", None, 78, "does not accept the token (401)"),
        (READING, "", None, 78, "does not let this token write to team/adapter (403)"),
        (TOKEN, "/commit/", 409, 1, "refuses the commit to team/adapter (409), since something else changes it"),
        (TOKEN, "/preupload/", 413, 78, "refuses these files for team/adapter: "),
        (TOKEN, sha256(SENT["adapter_model.safetensors"]).hexdigest(), 400, 78, "refuses these files for team/adapter: "),
        (TOKEN, "/commit/", 503, 1, "nothing is known to be in team/adapter, so run the same command again"),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence_without_the_token(
    token: str, part: str, status: int | None, code: int, says: str, hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    hub.faults.statuses = {part: [status]} if status else {}
    assert sent(adapter) == code
    message = capsys.readouterr()
    assert says in message.err and message.err.count("\n") == 1 and message.out == ""
    assert token not in message.err


@pytest.mark.parametrize("part", ["lfs", "api"])
def test_a_line_that_drops_in_the_middle_is_one_sentence_that_claims_nothing(
    part: str, hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults.cuts = {part: [100] * 50}
    assert sent(adapter) == 1
    message = capsys.readouterr()
    assert (
        "the files did not get to http://127.0.0.1:" in message.err
        and "nothing is known to be in team/adapter, so run the same command again" in message.err
    )
    assert message.err.count("\n") == 1 and message.out == ""
    assert all(not files for repository in hub.repositories.values() for files in repository.commits.values())


def test_a_line_that_drops_once_is_tried_again(hub: Hub, adapter: Path) -> None:
    hub.faults.cuts = {"lfs": [100]}
    assert sent(adapter) == 0
    repository = hub.repositories["models", NAME]
    assert repository.commits[repository.revisions["main"]] == SENT


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("adapter_model.safetensors", SENT["adapter_model.safetensors"][:-1], "is cut off: "),
        ("adapter_model.safetensors", None, "has no adapter_model.safetensors"),
        ("adapter_config.json", b"{", "adapter_config.json can't be read"),
        ("adapter_config.json", None, "holds no PEFT adapter"),
        ("manifest.json", b"{}", "holds no PEFT adapter"),
    ],
)
def test_what_is_no_whole_adapter_is_refused_before_the_hub_is_asked(
    name: str, content: bytes | None, says: str, hub: Hub, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / name).unlink(missing_ok=True)
    if content is not None:
        (adapter / name).write_bytes(content)
    assert sent(adapter) == 78
    assert says in capsys.readouterr().err
    assert hub.requests == []


def test_a_link_in_the_place_of_the_weights_is_not_followed(
    hub: Hub, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / "adapter_model.safetensors").rename(tmp_path / "weights")
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "weights")
    assert sent(adapter) == 78
    assert "adapter_model.safetensors is a link: copy the file itself there" in capsys.readouterr().err
    assert hub.requests == []
