"""What a verb prints has limits where nothing else has: the width of a pipe, the bars of a curve."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import sys
from pathlib import Path

import pytest

from lockstep.cli.jobs.top import _looks_of_folder
from lockstep.cli.main import main
from lockstep.cli.shared.terminal import console
from lockstep.plan.pages.top import top_page
from unit.platforms.jobs.test_logs import local  # noqa: F401 (a fixture)


def test_a_pipe_is_240_characters_wide() -> None:
    written = io.StringIO()
    console(file=written).print("x" * 300)
    assert [*map(len, written.getvalue().splitlines())] == [240, 60]


def test_garbage_is_looked_for_after_50_000_new_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = gc.get_threshold()
    monkeypatch.setattr(sys, "argv", ["lockstep", "--help"])
    try:
        with pytest.raises(SystemExit):
            main()
        assert gc.get_threshold()[0] == 50_000
    finally:
        gc.set_threshold(*usual)


def test_a_curve_has_sixty_points_and_bars(local: Path) -> None:  # noqa: F811
    lines = (json.dumps({"step": step, "loss": 3.0}) for step in range(1, 601))
    (local / "workspace/runs/x/logs/train_log.jsonl").write_text("\n".join(lines))
    page, _, _ = asyncio.run(anext(_looks_of_folder("x", local, 1.0)))  # type: ignore[arg-type]
    assert len(page["loss"]) == 60
    (loss,) = (line for line in top_page(page | {"loss": page["loss"] * 2}, 0.0) if line.startswith("loss "))
    assert loss.count("▁") == 60
