"""What removes a run that was only measured: its ranks can't bring the folder back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

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


def test_the_run_s_ranks_are_killed_before_they_save_and_its_folder_goes(tmp_path: Path) -> None:
    root = tmp_path / "runs/.measured-x"
    (root / "gang").mkdir(parents=True)
    (root / "gang/end.json").write_text("{}")
    ranks = []
    for name, folder in (("mine", root), ("other", tmp_path / "runs/other")):
        run = tmp_path / f"{name}.json"
        run.write_text(json.dumps({"runDir": str(folder)}))
        variables = {"RANK": "0", "LOCKSTEP_ATTEMPT": "1", "LOCKSTEP_RUN": str(run), "ROOT": str(folder)}
        rank = subprocess.Popen([sys.executable, "-c", SAVES], env={**os.environ, **variables}, stdout=subprocess.PIPE)
        assert rank.stdout is not None and rank.stdout.readline() == b"here\n"
        ranks.append(rank)
    mine, other = ranks
    try:
        source = source_of(forget)
        command = boot_command(source, json.dumps({"root": str(root)}), options=("-I", "-S"))
        subprocess.run([sys.executable, *command[1:]], input=source, check=True, timeout=60)
        assert mine.wait(10) == -signal.SIGKILL and not root.exists() and root.parent.is_dir()
        assert other.poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    forget.forget(tmp_path / "none")
