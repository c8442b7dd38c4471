"""Load of a host: the program that runs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lockstep.platforms.inpod import hostload, source_of
from lockstep.programs import boot_command


def test_it_runs_as_text_and_answers_every_line(tmp_path: Path) -> None:
    source = source_of(hostload)
    command = boot_command(source, json.dumps({"workspace": str(tmp_path / "a/b"), "datasets": "~/none"}), options=("-I", "-S"))
    done = subprocess.run([sys.executable, *command[1:]], input=source + b"{}\n{}\n", capture_output=True, check=True, timeout=60)
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["cpu"]["cores"] >= 0 and second["memory"]["limitBytes"] > second["memory"]["bytes"] > 0
    assert first["disks"][0]["path"] == str(tmp_path / "a/b") and first["disks"][0]["freeBytes"] > 0  # of the folder that is there
    assert len(first["disks"]) == 2 and len(first["load"]) == 3


def test_jobs_are_found_by_their_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"runDir": "/home/ada/lockstep/workspace/runs/shown"}))
    variables = {"RANK": "3", "LOCKSTEP_ATTEMPT": "1", "LOCKSTEP_RUN": str(run)}
    rank = subprocess.Popen(
        [sys.executable, "-c", "print('here', flush=True); input()"],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert rank.stdout is not None and rank.stdout.readline() == b"here\n"
        assert {"name": "shown", "ranks": [3]} in hostload.jobs()
    finally:
        rank.kill()
        rank.communicate()
