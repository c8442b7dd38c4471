"""checkpoint-N is what people expect there, follows the chain, and never takes what is somebody else's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep_train.checkpoint.format.views import keep_tokenizer, refresh_views
from support.checkpoint_cases import commits, make_commit


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"large")
    keep_tokenizer(tmp_path / "model", tmp_path / "run")
    make_commit(tmp_path / "run" / "checkpoints", "step-10.a1", eval_loss=1.5, ranks=2)
    return tmp_path / "run"


def refresh(run_dir: Path, *chain: str) -> None:
    refresh_views(run_dir, run_dir / "checkpoints", commits(*chain))


def views(run_dir: Path) -> list[str]:
    return sorted(entry.name for entry in run_dir.glob("checkpoint-*"))


def test_a_chat_template_of_the_run_s_own_is_the_one_beside_its_checkpoints(tmp_path: Path) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text(name)
    keep_tokenizer(tmp_path / "model", tmp_path / "run", tmp_path / "other" / "chat_template.jinja")
    keep_tokenizer(tmp_path / "model", tmp_path / "run", tmp_path / "other" / "chat_template.jinja")
    assert (tmp_path / "run" / "tokenizer" / "chat_template.jinja").read_text() == "other"


def test_a_view_holds_what_people_and_tools_look_for(run_dir: Path) -> None:
    refresh(run_dir, "step-10.a1")
    view = run_dir / "checkpoint-10"
    assert view.readlink() == Path("checkpoints/step-10.a1")
    assert sorted(path.name for path in view.iterdir()) == [
        "adapter_config.json", "manifest.json", "metadata.json",
        "shard-r00000-of-00002.safetensors", "shard-r00001-of-00002.safetensors", "tokenizer.json",
    ]  # fmt: skip
    found = json.loads((view / "metadata.json").read_text())
    assert (found["format"], found["num_shards"], found["step"], found["eval_loss"]) == ("sharded_lora", 2, 10, 1.5)
    assert json.loads((view / "adapter_config.json").read_text()) == {"r": 16}


def test_tokenizer_files_are_kept_once_however_many_commits_show_them(run_dir: Path) -> None:
    make_commit(run_dir / "checkpoints", "step-20.a1")
    refresh(run_dir, "step-20.a1", "step-10.a1")
    assert (run_dir / "tokenizer" / "tokenizer.json").stat().st_nlink == 3
    assert not (run_dir / "tokenizer" / "model.safetensors").exists()


def test_a_view_follows_the_chain_and_goes_with_its_commit(run_dir: Path) -> None:
    make_commit(run_dir / "checkpoints", "step-10.a2")
    make_commit(run_dir / "checkpoints", "step-20.a1")
    refresh(run_dir, "step-20.a1", "step-10.a1")
    refresh(run_dir, "step-10.a2")
    assert views(run_dir) == ["checkpoint-10"]
    assert (run_dir / "checkpoint-10").readlink().name == "step-10.a2"
    shutil.rmtree(run_dir / "checkpoints" / "step-10.a2")
    refresh(run_dir)
    assert views(run_dir) == []


def test_what_somebody_else_put_there_is_left_alone(run_dir: Path) -> None:
    (run_dir / "checkpoint-10").mkdir()
    (run_dir / "checkpoint-20").write_text("mine")
    (run_dir / "checkpoint-30").symlink_to("backup/step-7.a1")
    refresh(run_dir, "step-10.a1")
    assert (views(run_dir), list((run_dir / "checkpoint-10").iterdir())) == (["checkpoint-10", "checkpoint-20", "checkpoint-30"], [])


def test_a_volume_without_links_gets_a_folder_that_says_where_the_commit_is(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    refresh(run_dir, "step-10.a1")
    view = run_dir / "checkpoint-10"
    assert sorted(path.name for path in view.iterdir()) == ["adapter_config.json", "metadata.json", "tokenizer.json"]
    assert json.loads((view / "metadata.json").read_text())["commit"] == "step-10.a1"
    refresh(run_dir)
    assert views(run_dir) == []


def test_a_damaged_commit_is_not_dressed_up(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step-10.a1" / "manifest.json").write_text("{")
    refresh(run_dir, "step-10.a1")
    assert not (run_dir / "checkpoints" / "step-10.a1" / "metadata.json").exists()
