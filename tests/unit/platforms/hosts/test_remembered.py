"""What this machine remembers of jobs on hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.platforms.hosts.remembered import Remembered, remember, remembered
from unit.plan.hosts.test_leftovers import FIRST


def test_the_newest_256_jobs_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    jobs = {
        f"j{number}": Remembered(replace(FIRST, job={"metadata": {"name": f"j{number}", "uid": "u"}}), "step 5") for number in range(300)
    }
    remember("lab", jobs)
    assert list(remembered("lab")) == [f"j{number}" for number in range(44, 300)]
    assert [path.name for path in (tmp_path / "hosts").iterdir()] == ["lab.json"]
    remember("lab", {}, gone=["j299"])
    assert len(remembered("lab")) == 255
