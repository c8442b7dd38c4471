"""The demo's model and data are made on the spot, the same everywhere, and complete or not there."""

from __future__ import annotations

import json
from pathlib import Path

from rank_harness import ForkServer, RunFile


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_demo_is_deterministic_readable_by_everyone_and_trains(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    for name in ("one", "two"):
        ranks.run("make_demo", [None], arguments={"models": str(tmp_path / name), "datasets": str(tmp_path / name)})
    made = contents(tmp_path / "one")
    assert made == contents(tmp_path / "two")
    assert set(made) > {"demo.jsonl", "demo.txt", "tiny-base/config.json", "tiny-base/model.safetensors", "tiny-base/tokenizer.json"}
    assert all(path.stat().st_mode & 0o004 for path in (tmp_path / "one").rglob("*"))
    assert all(json.loads(line)["text"] for line in made["demo.jsonl"].splitlines())

    settings = {"model": {"name": str(tmp_path / "one/tiny-base")}, "data": {"path": str(tmp_path / "one/demo.txt")}}
    ranks.run("main", [run_file("trained", **settings, optimization={"maxSteps": 1}, evaluation={"samples": 2})])


def test_what_is_there_is_left_alone(ranks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "tiny-base").mkdir()
    (tmp_path / "tiny-base" / "config.json").write_text("mine")
    (tmp_path / "demo.jsonl").write_text("mine")
    ranks.run("make_demo", [None], arguments={"models": str(tmp_path), "datasets": str(tmp_path)})
    assert set(contents(tmp_path).values()) == {b"mine"}
