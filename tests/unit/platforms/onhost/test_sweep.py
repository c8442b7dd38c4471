"""Folders of short runs that a power cut leaves behind: they go with the next start, short run or deletion, and those of runs under way
stay.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.platforms.onhost import keep, readings, sweep
from unit.platforms.onhost.test_keep_starts import Keeping

NAME = ".x.0123456789ab"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of all jobs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    jobs = tmp_path / "lockstep/jobs"
    jobs.mkdir(parents=True)
    yield jobs


class Short(Keeping):
    """A short run whose agent sleeps."""

    def __init__(self, folder: Path) -> None:
        command = ["sh", "-c", "echo $$; exec sleep 600"]
        super().__init__({"do": "brief", "folder": str(folder), "command": command, "environment": {}, "folders": [], "forget": None})


def plant(jobs: Path, name: str = NAME, run_dir: Path | None = None) -> Path:
    """Make what a short run has after a power cut: nobody holds its lock."""
    folder = jobs / name
    folder.mkdir()
    (folder / "key").write_text("secret")
    (folder / sweep.ALIVE).touch()
    if run_dir is not None:
        run_dir.mkdir()
        (folder / "run.json").write_text(json.dumps({"runDir": str(run_dir)}))
    return folder


def swept() -> None:
    with readings.alone():
        sweep.sweep()


def make_old(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder, (then, then))


def test_a_short_run_and_a_deletion_remove_what_a_power_cut_left_of_short_runs(jobs: Path) -> None:
    left = plant(jobs)
    short = Short(jobs / ".y.0123456789ab")
    assert short.answer() == {"placed": True}
    assert not left.exists()
    short.leave()
    left = plant(jobs)
    keep.remove({"job": "x", "now": True})
    assert not left.exists() and list(jobs.iterdir()) == []


def test_a_short_run_under_way_keeps_its_folder_until_its_agent_has_ended_however_old_it_is(jobs: Path) -> None:
    folder = jobs / NAME
    short = Short(folder)
    assert short.answer() == {"placed": True}
    make_old(folder, 10 * 86400.0)
    swept()
    assert folder.exists()
    short.write(b"go\n")
    agent = int(short.answer()["line"])
    try:
        short.process.send_signal(signal.SIGKILL)
        short.process.wait(timeout=30)
        make_old(folder, 10 * 86400.0)
        swept()
        assert folder.exists(), "its agent is about to end by itself"
    finally:
        descriptor = os.pidfd_open(agent)
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    assert eventually_gone(folder)
    short.leave()


def eventually_gone(folder: Path) -> bool:
    """Sweep until the folder has gone: the kernel unlocks a file a moment after its process was killed."""
    end = time.monotonic() + 30
    while folder.exists() and time.monotonic() < end:
        swept()
        time.sleep(0.05)
    return not folder.exists()


def test_a_folder_without_a_lock_goes_after_a_day(jobs: Path) -> None:
    folder = plant(jobs)
    (folder / sweep.ALIVE).unlink()
    swept()
    assert folder.exists()
    make_old(folder, 86400.0 + 60)
    swept()
    assert not folder.exists()


def test_the_folder_of_a_measured_run_goes_with_it_and_no_other_one(jobs: Path, tmp_path: Path) -> None:
    plant(jobs, run_dir=tmp_path / ".measured-x")
    plant(jobs, ".demo.0123456789ab", run_dir=tmp_path / "demo")
    plant(jobs, ".used.0123456789ab", run_dir=tmp_path / ".measured-used")
    with sweep.held(plant_again(jobs, ".used.ba9876543210", tmp_path / ".measured-used")):
        swept()
        assert sorted(path.name for path in tmp_path.iterdir()) == [".measured-used", "demo", "lockstep"]
    swept()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "lockstep"]
    assert list(jobs.iterdir()) == []


def plant_again(jobs: Path, name: str, run_dir: Path) -> Path:
    """Make the folder of another short run of the same job."""
    folder = plant(jobs, name)
    (folder / "run.json").write_text(json.dumps({"runDir": str(run_dir)}))
    return folder
