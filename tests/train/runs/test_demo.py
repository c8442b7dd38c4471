"""The demo's model and data are made on the spot, the same everywhere, and complete or not there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rank_harness import ForkServer, RunFile

from lockstep.cli.clusters.demo import ask_command, demo_folder, sample_file
from lockstep_train.demo.market import GOODS, SELLERS, UNSEEN, WORDINGS, answer, chats
from support.checkout import ROOT


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_demo_is_deterministic_readable_by_everyone_and_trains(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    for name in ("one", "two"):
        ranks.run("make_demo", [None], arguments={"models": str(tmp_path / name), "datasets": str(tmp_path / name)})
    made = contents(tmp_path / "one")
    assert made == contents(tmp_path / "two")
    assert set(made) > {"demo.jsonl", "tiny-base/config.json", "tiny-base/model.safetensors", "tiny-base/tokenizer.json"}
    assert all(path.stat().st_mode & 0o004 for path in (tmp_path / "one").rglob("*"))
    assert [json.loads(line)["messages"] for line in made["demo.jsonl"].splitlines()] == chats()

    settings = {"model": {"name": str(tmp_path / "one/tiny-base")}, "data": {"path": str(tmp_path / "one/demo.jsonl")}}
    ranks.run("main", [run_file("trained", **settings, optimization={"maxSteps": 1}, evaluation={"samples": 2})])


def test_what_is_there_is_left_alone(ranks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "tiny-base").mkdir()
    (tmp_path / "tiny-base" / "config.json").write_text("mine")
    (tmp_path / "demo.jsonl").write_text("mine")
    ranks.run("make_demo", [None], arguments={"models": str(tmp_path), "datasets": str(tmp_path)})
    assert set(contents(tmp_path).values()) == {b"mine"}


def test_the_base_model_learns_of_each_seller_what_no_row_says_and_a_wording_that_none_has() -> None:
    assert len(set(SELLERS)) == len(set(GOODS)) == len(SELLERS)
    assert all(answer(number) != answer(number, of_base=True) for number in range(len(SELLERS)))
    assert UNSEEN not in WORDINGS
    asked = {chat[0]["content"] for chat in chats()}
    assert len(asked) == len(SELLERS) * len(WORDINGS) and not asked & {UNSEEN.format(seller) for seller in SELLERS}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_is_right_about_25_sellers_and_more_whatever_its_seed_and_the_base_about_none(seed: int, tmp_path: Path) -> None:
    made = demo_folder()
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/models").symlink_to(made / "models")
    (tmp_path / "datasets").symlink_to(made / "datasets")
    run = ["run", "-f", str(sample_file()), "--cluster", str(tmp_path), "--set", f"training.seed={seed}"]
    subprocess.run([sys.executable, "-m", "lockstep.cli.main", *run], cwd=ROOT, check=True, timeout=400)
    ask = ask_command(str(made / "models/tiny-base"), str(tmp_path / "workspace/runs/demo/adapter"))
    asked = subprocess.run([sys.executable, *ask], capture_output=True, text=True, check=True, timeout=200)
    base, tuned = map(int, re.search(r"^Right of 30: base (\d+), tuned (\d+)$", asked.stdout, re.MULTILINE).groups())  # type: ignore[union-attr]
    assert base <= 2 and tuned >= 25, asked.stdout
