""".venv/bin/python tests/bench/checkpoint.py --json: what a checkpoint costs a training, beside what others' cost.

Two gloo ranks train a LoRA adapter of a small Llama (ZeRO-3, BF16 where the CPU has instructions for it, else FP32; masters and moments in
FP32) and save the same state in every way, in turn, round after round, each beside as many steps without a save. All figures are medians of
the rounds, of the slower rank:

stall_seconds    the call, and any wait before the next optimizer step
commit_seconds   from the call until all files of the checkpoint and their names are durable (ours: without the rotation that follows)
added_seconds    wall time of the steps with a save less that of the same steps without one
added_cpu_seconds   processor time of both ranks, likewise
collective_bytes sent into c10d operators by one save, in any thread, over both ranks
bytes            on the disk after one save, over both ranks; per trainable parameter: bytes_per_parameter
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lockstep_machine.network import free_ports

HERE = Path(__file__).resolve().parent
RANKS = 2
SIZES = {"24 MB": 51, "240 MB": 508}
"""Size of masters and moments a rank → the rank of LoRA that makes it, on the model of checkpoint_ways.make_engine."""


def run_ranks(size: str, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Start the ranks of one size and return rank 0's results. Raises CalledProcessError."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent / "workspace"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    output = folder / "results.json"
    command = [sys.executable, str(Path(__file__)), "--as-rank", size, "--rounds", str(rounds), "--folder", str(folder)]
    with (folder / "ranks.log").open("w") as log:
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=log)
            for rank in range(RANKS)
        ]
        try:
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        sys.stderr.write((folder / "ranks.log").read_text()[-4000:])
        raise subprocess.CalledProcessError(max(codes, key=abs), command)
    return json.loads(output.read_text())


def measure(size: str, rounds: int, folder: Path) -> None:
    """Measure as one rank."""
    from checkpoint_ways import all_ways, collective_bytes, make_engine, train_step

    from lockstep_train.base.errors import leave_process
    from lockstep_train.base.ranks import join, leave
    from lockstep_train.base.runfile import rank_environment

    ranks = join(rank_environment())
    engine = make_engine(SIZES[size])
    ways = all_ways(engine, ranks, folder)
    for _ in range(2):
        train_step(engine)
    facts = {}
    for way in ways:  # also warms memory and page cache up
        way.start(0)
        way.before_update()
        way.done()
        sent = collective_bytes(lambda way=way: (way.start(1), way.before_update(), way.done()))  # type: ignore[misc]
        facts[way.name] = {"collective_bytes": round(ranks_sum(sent)), "bytes": bytes_in(way.folder(1)), "parameters": way.parameters}
        print(way.name, facts[way.name], flush=True)
    samples: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            samples[way.name].append(one_sample(engine, way, number + 2))
            if ranks.first:
                shutil.rmtree(way.folder(number + 2), ignore_errors=True)
                print(way.name, samples[way.name][-1], flush=True)
    if ranks.first:
        results = [summary(size, way.name, facts[way.name], samples[way.name]) for way in ways]
        (folder / "results.json").write_text(json.dumps(results))
    leave()
    leave_process(0)


def one_sample(engine: Any, way: Any, number: int) -> dict[str, float]:
    """Steps without a save, then the same with one; each figure is the slower rank's, processor time both ranks'."""
    from checkpoint_ways import STEPS, train_step

    def steps(saving: bool) -> tuple[float, float, float]:
        barrier()
        begun, processor, stall = time.monotonic(), time.process_time(), 0.0
        if saving:
            way.start(number)
            stall = time.monotonic() - begun
        for _ in range(STEPS):
            stall += train_step(engine, way.before_update if saving else None)
        if saving:
            way.done()
        ended = time.monotonic()
        return ended - begun, time.process_time() - processor, stall

    plain_wall, plain_processor, _ = steps(saving=False)
    called = time.monotonic()
    wall, processor, stall = steps(saving=True)
    return {
        "stall_seconds": ranks_max(stall),
        "commit_seconds": ranks_max(way.done() - way.called),
        "added_seconds": ranks_max(wall) - ranks_max(plain_wall),
        "added_cpu_seconds": ranks_sum(processor - plain_processor),
        "step_seconds": ranks_max(plain_wall) / STEPS,
        "episode_seconds": time.monotonic() - called,
    }


def summary(size: str, name: str, facts: dict[str, Any], samples: list[dict[str, float]]) -> dict[str, Any]:
    medians = {key: round(statistics.median(sample[key] for sample in samples), 5) for key in samples[0]}
    spread = {"stall_seconds_max": round(max(sample["stall_seconds"] for sample in samples), 5)}
    return {
        "name": name,
        "size": size,
        **medians,
        **spread,
        "rounds": len(samples),
        **facts,
        "bytes_per_parameter": round(facts["bytes"] / facts["parameters"], 3),
    }


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def ranks_max(value: float) -> float:
    return reduced(value, "MAX")


def ranks_sum(value: float) -> float:
    return reduced(value, "SUM")


def reduced(value: float, operation: str) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
    return float(tensor)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'':22}{'size':>8}{'stall s':>9}{'commit s':>10}{'added s':>9}{'cpu s':>8}{'collective MB':>15}{'B/parameter':>13}"]
    lines += [
        f"{item['name']:22}{item['size']:>8}{item['stall_seconds']:9.4f}{item['commit_seconds']:10.3f}{item['added_seconds']:9.3f}"
        f"{item['added_cpu_seconds']:8.3f}{item['collective_bytes'] / 1e6:15.3f}{item['bytes_per_parameter']:13.2f}"
        for item in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", action="append", choices=SIZES, help="default: all")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the folder for temporary files)")
    parser.add_argument("--as-rank", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        measure(options.as_rank, options.rounds, options.folder)
        return
    results: list[dict[str, Any]] = []
    for size in options.size or SIZES:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-bench-") as folder:
            results += run_ranks(size, options.rounds, Path(folder))
    machine = {"cpus": os.cpu_count(), "loadAverage": os.getloadavg()[0]}
    print(json.dumps({"results": results, "machine": machine}, indent=1) if options.json else table(results))


if __name__ == "__main__":
    main()
