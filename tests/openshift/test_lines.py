"""Every line with kubectl or oc that this project tells people to type is one that the real oc understands."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.kubectl.lines import OF_ADM, Line, all_lines
from support.kubectl.parser import Parser

pytestmark = pytest.mark.long


def test_oc_understands_every_line(programs: Path, tmp_path: Path) -> None:
    lines = [Line(_with_oc(line), line.place, line.is_named) for line in all_lines()]
    assert Parser((str(programs / "oc"),), tmp_path).complaints(lines) == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("oc top pod", 'unknown command "top"'), ("oc policy add-role-to-group view", "at least two arguments"),
            ("oc adm policy who-can use", "two or three arguments"),
        ("oc secrets link x --for=pull", "must have"), ("oc new-project x --skip-config", "unknown flag: --skip-config"),
    ],
)  # fmt: skip
def test_oc_says_what_is_wrong_with_a_line(programs: Path, tmp_path: Path, wrong: str, why: str) -> None:
    (complaint,) = Parser((str(programs / "oc"),), tmp_path).complaints([Line(wrong, "here")])
    assert complaint.startswith(f"here: {wrong}: ") and why in complaint


def _with_oc(line: Line) -> str:
    """Return the line as a person with oc types it: of kubectl's commands, it has a few in `oc adm`."""
    tool, _, words = line.text.partition(" ")
    return f"oc adm {words}" if tool == "kubectl" and line.command in OF_ADM else f"oc {words}"


def test_lockstep_is_a_plugin_of_oc(programs: Path, tmp_path: Path) -> None:
    assert "Usage: kubectl-lockstep version " in Parser((str(programs / "oc"),), tmp_path).run("lockstep", "version", "--help").stdout
