"""The parts of a start."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep_train.base.imports import hidden_packages, uncollected
from lockstep_train.report.reporter import StartUp, process_start, startup_line
from support.checkout import ROOT


def test_parts_add_up_to_the_whole_and_are_told_once() -> None:
    times = iter([12.0, 12.5, 15.0, 15.5])
    startup = StartUp(began=10.0, clock=lambda: next(times))
    for part in ("imports", "join", "imports"):
        startup.done(part)
    seconds = startup.finish("first step")
    assert seconds == {"imports": 4.5, "join": 0.5, "first step": 0.5, "total": 5.5}
    assert startup.finish("first step") is None
    assert startup_line(seconds) == "Start-up: 5.5 s to the end of the first step (imports 4.5, join 0.5, first step 0.5)"


def test_the_start_of_a_process_is_read_behind_a_name_with_spaces_and_parentheses(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(f"7 (a ) b) S {' '.join(['0'] * 18)} 4200 0 0\n")
    assert process_start(tmp_path) == 42.0


def test_a_hidden_package_is_not_there_for_who_looks_and_is_there_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with hidden_packages("colorsys"):
        assert "colorsys" in sys.modules
        assert sys.modules["colorsys"] is None
    assert "colorsys" not in sys.modules


def test_nothing_looks_for_garbage_while_packages_are_imported_or_ever_at_what_they_leave() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        left = [[] for _ in range(1000)]
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(left)


def test_a_setting_that_is_wrong_is_told_without_importing_torch(tmp_path: Path) -> None:
    run = tmp_path / "run.json"
    run.write_text("{}")
    code = "import sys; from lockstep_train.__main__ import main; code = main([]); print('torch' in sys.modules); sys.exit(code)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"LOCKSTEP_RUN": str(run), "PYTHONPATH": str(ROOT / "workspace")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (78, "False"), ended.stderr
