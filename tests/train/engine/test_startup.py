"""The cost of a start is reported, and nothing is imported that a run doesn't use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rank_harness import SOURCES, ForkServer, RunFile


def test_a_start_is_told_in_parts_that_add_up(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    ended = ranks.run("main", [run_file(optimization={"maxSteps": 2, "globalBatchSize": 4})] * 2)
    assert ended.output.count("Start-up: ") == 1
    records = [json.loads(line) for line in (tmp_path / "run" / "logs" / "events.jsonl").read_text().splitlines()]
    (seconds,) = [record["seconds"] for record in records if record["kind"] == "startUp"]
    parts = [
        "imports", "join", "memoryPlan", "data", "load", "engine", "selfTest", "baseHash", "restore", "saveMemory", "logs", "evaluation",
            "firstStep",
    ]  # fmt: skip
    assert list(seconds) == [*parts, "total"]
    assert abs(sum(seconds[part] for part in parts) - seconds["total"]) < 0.01 * len(parts)


def test_a_run_imports_neither_what_packs_weights_nor_other_trackers_nor_a_compiler(run_file: RunFile) -> None:
    """In a process of its own: the server that the other tests fork from has imported everything. Most of what is there is never looked
    through for garbage.
    """
    code = (
        "import gc, os, sys; from lockstep_train.__main__ import main; code = main([]);"
        "loaded = [name for name in ('bitsandbytes', 'mlflow', 'wandb', 'torch._inductor.compile_fx') if name in sys.modules];"
        "print(loaded, gc.get_freeze_count() > len(gc.get_objects()), flush=True);"
        "os._exit(code)"
    )
    run = run_file(zeroStage="Stage3", optimization={"maxSteps": 1}, evaluation=None)
    environment = {**os.environ, "LOCKSTEP_RUN": str(run), "PYTHONPATH": str(SOURCES), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "[] True"), ended.stdout + ended.stderr
