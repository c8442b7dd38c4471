"""Marks by which hosts find out who shares a folder: also of a host that can write none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lockstep.platforms.onhost import marks


def answers(folder: str, seen: list[str]) -> list[dict[str, object]]:
    """Answer of the program for a folder, and those of these names that it sees there."""
    found = []
    with subprocess.Popen([sys.executable, str(marks.__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        for question in ({"folder": folder}, {"marks": seen, "seconds": 0}):
            program.stdin.write(f"{json.dumps(question)}\n")
            program.stdin.flush()
            found.append(json.loads(program.stdout.readline()))
    return found


def test_a_host_writes_a_mark_looks_for_those_of_others_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    mark, seen = answers(str(tmp_path), ["theirs", "none"])
    assert str(mark["mark"]).startswith(marks.MARK) and seen == {"seen": ["theirs"]}
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_host_that_can_write_no_mark_says_why_and_looks_for_those_of_others() -> None:
    assert answers("/proc", ["version", "none"]) == [{"problem": "/proc: No such file or directory"}, {"seen": ["version"]}]
