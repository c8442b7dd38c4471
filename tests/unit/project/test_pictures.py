"""Pictures of terminals: each is drawn from its recording, shown by a page, fetches nothing, and is found out when its words have
changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkout import ROOT

PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))


def pictures(*words: str, scripts: Path = ROOT / "scripts") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(scripts)}
    return subprocess.run([sys.executable, "-m", "pictures", *words], env=environment, capture_output=True, text=True, check=False)


def site_python() -> str:
    """Python of the site's environment."""
    code = "from lockstep.environments import cache_root, packages; print(packages('docs', cache_root(), str) / 'bin/python')"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The parts of a checkout that pictures need, to be changed by a test."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("casts", "pictures"):
        shutil.copytree(ROOT / "docs" / name, tmp_path / "docs" / name)
    for name in (".venv", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_every_picture_is_drawn_from_its_recording() -> None:
    done = pictures("--draw", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem for path in PICTURES} == {path.stem for path in (ROOT / "docs/casts").glob("*.cast")}


def test_the_front_page_is_as_its_picture_shows_it() -> None:
    done = pictures("--check", "help")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_recording_whose_words_have_changed_is_told_and_replaced(checkout: Path) -> None:
    cast, picture = checkout / "docs/casts/help.cast", checkout / "docs/pictures/help.svg"
    now = cast.read_text()
    before = now.replace("List jobs", "Show tasks")
    assert before != now
    cast.write_text(before)
    told = pictures("--check", "help", scripts=checkout / "scripts")
    assert told.returncode == 1
    assert "-get Show tasks: nodes" in told.stdout and "+get List jobs: nodes" in told.stdout
    assert cast.read_text() == before
    drawn = pictures("--draw", "help", scripts=checkout / "scripts")
    assert drawn.returncode == 1 and "Show tasks" in picture.read_text()
    replaced = pictures("help", scripts=checkout / "scripts")
    assert replaced.returncode == 1
    assert "List jobs" in picture.read_text()
    assert pictures("help", scripts=checkout / "scripts").returncode == 0


def test_figures_and_curves_may_differ_and_words_may_not() -> None:
    lines = ["step 80/400, 2m27s left █▇▆", "step 120/400, 59s left  ▃▃", "step 80/400, 2m27s over █▇▆"]
    code = "import json, sys; from pictures.play import words; print(json.dumps(words(json.loads(sys.argv[1]))))"
    done = subprocess.run([site_python(), "-c", code, json.dumps(lines)], cwd=ROOT / "scripts", capture_output=True, text=True, check=True)
    first, same, other = json.loads(done.stdout)
    assert first == same != other


@pytest.mark.parametrize("words", [["nope"], ["help", "nope"]])
def test_an_unknown_scene_is_refused_with_those_there_are(words: list[str]) -> None:
    done = pictures(*words)
    assert done.returncode == 2
    assert "no such scene: nope; there are help, quickstart, chat" in done.stderr


def test_a_drawing_has_colors_places_and_each_line_once(checkout: Path) -> None:
    events = [[0.1, "o", "\x1b[1mNAME\x1b[0m   READY\r\n"], [2.0, "o", "\x1b[32mdemo\x1b[0m    2/2 \x1b[7m<b>\x1b[0m"], [9.0, "m", "end"]]
    header = {"version": 2, "width": 20, "height": 5, "title": "a & b"}
    (checkout / "docs/casts/top.cast").write_text("".join(json.dumps(line) + "\n" for line in (header, *events)))
    pictures("--draw", "top", scripts=checkout / "scripts")
    drawn = (checkout / "docs/pictures/top.svg").read_text()
    assert "<title>a &amp; b, 3 times as fast</title>" in drawn
    assert re.search(r'<text x="0.0" textLength="33.6" class="b">NAME</text><text x="58.8"[^>]*>READY</text>', drawn)
    assert re.search(r'<text [^>]*style="fill:#8fce7a">demo</text>', drawn) and "&lt;b&gt;" in drawn
    assert drawn.count(">NAME<") == 1 and drawn.count('<g id="f') == 2
    assert "prefers-reduced-motion" in drawn


def test_a_film_begins_when_there_is_something_to_read(checkout: Path) -> None:
    events = [[0.1, "o", "$ "], [3.0, "o", "lockstep get\r\n"], [6.0, "o", "NAME"], [9.0, "m", "end"]]
    header = {"version": 2, "width": 20, "height": 5, "title": "get"}
    (checkout / "docs/casts/top.cast").write_text("".join(json.dumps(line) + "\n" for line in (header, *events)))
    pictures("--draw", "top", scripts=checkout / "scripts")
    drawn = (checkout / "docs/pictures/top.svg").read_text()
    assert ">NAME<" in drawn and '<g id="f' not in drawn, "the first screen that is drawn is the last one"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_fetches_nothing_and_is_shown_by_a_page(path: Path) -> None:
    text = path.read_text()
    assert "@font-face" not in text and "<script" not in text and not re.search(r"(?:href|src|url\()\S*https?:", text)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(f"pictures/{path.name})" in page.read_text() for page in pages)


@pytest.mark.parametrize("path", [*PICTURES, *sorted((ROOT / "docs/casts").glob("*.cast"))], ids=lambda path: path.name)
def test_a_picture_names_no_folder_of_the_machine_that_it_was_made_on(path: Path) -> None:
    assert not re.search(rf"/root|/home/|/tmp/|{re.escape(str(ROOT))}", path.read_text())
