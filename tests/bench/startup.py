"""Measure a start, in parts, from the process's start to the end of its first step; a restart costs the same:

.venv/bin/python tests/bench/startup.py --runs 5 --ranks 2 --json

The model is tiny, so that what is left is what every run pays. Seconds are medians over the runs, of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lockstep_machine.network import free_ports

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "workspace"
MAKE_MODEL = "import sys; import rank_cases; rank_cases.make_model(sys.argv[1])"


def environment(**variables: str) -> dict[str, str]:
    paths = f"{SOURCES}:{ROOT / 'tests' / 'train' / 'ranks'}"
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **variables}


def make_inputs(folder: Path, stage: str) -> Path:
    """A tiny model, a few samples, and the run's file."""
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(folder / "model")], env=environment(), check=True, capture_output=True)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": f"sample {number} of a few"}) + "\n" for number in range(32)))
    training = {
        "model": {"name": str(folder / "model")},
        "lora": {"rank": 4, "alpha": 8, "dropout": "0", "targetModules": ["q_proj", "v_proj"]},
        "zeroStage": stage,
        "precision": "FP32",
        "seed": 1,
        "data": {"path": str(folder / "data.jsonl"), "maxLength": 32},
        "optimization": {"epochs": 1, "maxSteps": 1, "learningRate": "1e-3", "microBatchSize": 1},
        "evaluation": None,
        "checkpoint": {"everySteps": 100, "keep": 1, "resumeFrom": "None"},
    }
    run = folder / "run.json"
    run.write_text(json.dumps({"format": "lockstep-run/1", "job": {"name": "bench"}, "runDir": str(folder / "run"), "training": training}))
    return run


def start(run: Path, ranks: int) -> dict[str, float]:
    """Start all ranks anew; the seconds of each part, and the processor's seconds of one rank, over its whole short run."""
    port = str(free_ports(1)[0])
    processes = []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for rank in range(ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        variables = environment(MASTER_ADDR="127.0.0.1", LOCKSTEP_RUN=str(run), **{name: str(value) for name, value in names.items()})
        processes.append(subprocess.Popen([sys.executable, "-m", "lockstep_train"], env=variables, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    events = (run.parent / "run" / "logs" / "events.jsonl").read_text().splitlines()
    seconds: dict[str, float] = [record for line in events if (record := json.loads(line))["kind"] == "startUp"][-1]["seconds"]
    return {**seconds, "processor": round((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / ranks, 2)}


def measure(runs: int, ranks: int, stage: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = make_inputs(Path(folder), stage)
        start(run, ranks)  # writes bytecode, fills the page cache and the cache of tokens
        taken = [start(run, ranks) for _ in range(runs)]
    results = [{"name": part, "seconds": round(statistics.median(one[part] for one in taken), 2)} for part in taken[0]]
    return {"runs": runs, "ranks": ranks, "zeroStage": stage, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a start of the trainer in parts.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stage", default="Stage3", choices=["Stage1", "Stage2", "Stage3"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    report = measure(options.runs, options.ranks, options.stage)
    if options.json:
        print(json.dumps(report))
        return
    for result in report["results"]:
        print(f"{result['name']:>12}  {result['seconds']:6.2f} s")


if __name__ == "__main__":
    main()
