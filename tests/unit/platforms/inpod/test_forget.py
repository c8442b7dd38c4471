"""What removes a run that was only measured: its ranks can't bring the folder back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.platforms.inpod import forget, source_of
from lockstep.programs import boot_command

SAVES = """
import os, pathlib, signal, sys, time
def save(*_):
    pathlib.Path(os.environ["ROOT"], "checkpoints").mkdir(parents=True, exist_ok=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("here", flush=True)
time.sleep(1000)
"""


def test_ranks_are_killed_before_they_save_and_the_folder_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "runs/.measured-x"
    (root / "gang").mkdir(parents=True)
    (root / "gang/end.json").write_text("{}")
    rank = subprocess.Popen([sys.executable, "-c", SAVES], env={**os.environ, "ROOT": str(root)}, stdout=subprocess.PIPE)
    assert rank.stdout is not None and rank.stdout.readline() == b"here\n"
    monkeypatch.setattr(forget, "rank_processes", lambda: iter([(Path("/proc", str(rank.pid)), {})]))  # (of a pod's own processes)
    forget.forget(root)
    assert rank.wait(10) == -signal.SIGKILL and not root.exists() and root.parent.is_dir()
    rank.stdout.close()


def test_it_runs_as_text_with_nothing_but_the_standard_library(tmp_path: Path) -> None:
    source = source_of(forget).replace(
        b"for process, _ in list(rank_processes())", b"for process, _ in []"
    )  # (this machine runs other tests)
    root = tmp_path / ".measured-x"
    (root / "gang").mkdir(parents=True)
    (root / "gang/end.json").write_text("{}")
    command = boot_command(source, json.dumps({"root": str(root)}), options=("-I", "-S"))
    subprocess.run([sys.executable, *command[1:]], input=source, check=True, timeout=60)
    assert not root.exists()


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forget, "rank_processes", lambda: iter(()))
    forget.forget(tmp_path / "none")
