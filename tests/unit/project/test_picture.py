"""Pictures of terminals: what was printed, and nothing that is fetched from elsewhere."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkout import ROOT

PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))


def test_a_picture_has_the_text_with_its_colors_and_without_the_terminal_s_commands(tmp_path: Path) -> None:
    target = tmp_path / "x.svg"
    printed = "\x1b[?25l\x1b[2K\x1b[1mNAME\x1b[0m  READY\r\n\x1b[32mdemo\x1b[0m  2/2\r\n"
    subprocess.run([sys.executable, str(ROOT / "scripts/picture.py"), "lockstep get", str(target)], input=printed, text=True, check=True)
    texts = [html.unescape(text).replace("\xa0", " ").strip() for text in re.findall(r"<text[^>]*>([^<]*)<", target.read_text())]
    assert "lockstep get" in texts and "demo" in texts and any("2/2" in text for text in texts)
    assert "fill" in target.read_text()


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_fetches_nothing_and_is_shown_by_a_page(path: Path) -> None:
    text = path.read_text()
    assert "@font-face" not in text and not re.search(r"(?:href|src|url\()\S*https?:", text)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(f"pictures/{path.name}" in page.read_text() for page in pages)
