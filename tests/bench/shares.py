"""Tokens per second of unlike ranks with equal shares and with measured ones:

.venv/bin/python tests/bench/shares.py --json

Real ranks over gloo train a tiny model; beside it each rank sleeps for every 40 tokens it computes, by its speed, as a host does while its
GPU computes. So the figures follow from the speeds, not from this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "train" / "ranks"))

from rank_harness import ForkServer  # noqa: E402

SPEEDS = (1.0, 0.55, 0.5)
WARM_STEPS = 3
BATCH, EQUAL_SIZE = 45, 15
"""Samples of a step, and the equal micro-batch of three ranks with which one turn is enough."""
GATHERED = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0}}
"""Settings with which Stage3 gathers weights as small as these, too."""


def write_run(folder: Path, stage: str, balance: str, steps: int) -> Path:
    training = {
        "model": {"name": str(folder / "model")},
        "lora": {"rank": 4, "alpha": 8, "dropout": "0", "targetModules": ["q_proj", "v_proj"]},
        "zeroStage": stage,
        "precision": "FP32",
        "seed": 1,
        "data": {"path": str(folder / "data.jsonl"), "maxLength": 64},
        "optimization": {
            "epochs": 100, "maxSteps": steps, "learningRate": "1e-3", "microBatchSize": EQUAL_SIZE, "globalBatchSize": BATCH,
                "balance": balance,
        },
        "deepspeed": GATHERED if stage == "Stage3" else None,
        "evaluation": None,
        "checkpoint": {"everySteps": 1000, "keep": 2, "resumeFrom": "None"},
    }  # fmt: skip
    run = folder / f"{stage}-{balance}.json"
    document = {"format": "lockstep-run/1", "job": {"name": run.stem}, "runDir": str(folder / run.stem), "training": training}
    run.write_text(json.dumps(document))
    return run


def records(folder: Path, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / f"{log}.jsonl").read_text().splitlines()]


def measure(ranks: ForkServer, folder: Path, stage: str, balance: str, options: argparse.Namespace) -> dict[str, Any]:
    seconds = {str(rank): options.sample_seconds / speed for rank, speed in enumerate(options.speeds)}
    run = write_run(folder, stage, balance, WARM_STEPS + options.steps)
    ranks.run("train_unlike", [run] * len(options.speeds), arguments={"seconds": seconds})
    steps = records(folder / run.stem, "train_log")[-options.steps :]
    chosen = [event for event in records(folder / run.stem, "events") if event["kind"] == "balance"]
    count = len(options.speeds)
    return {
        "tokensPerSecond": statistics.median(step["tokensPerSecond"] for step in steps),
        "waitShare": statistics.median(step["waitSeconds"] / step["stepSeconds"] for step in steps),
        "shares": chosen[-1]["shares"] if chosen else [round(1 / count, 4)] * count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=float, nargs="+", default=list(SPEEDS), help="speed of each rank, relative to the first")
    parser.add_argument("--sample-seconds", type=float, default=0.12, help="time of 40 tokens on a rank of speed 1 (default: 0.12)")
    parser.add_argument("--steps", type=int, default=6, help="steps that count (default: 6)")
    parser.add_argument("--stages", nargs="+", default=["Stage1", "Stage2", "Stage3"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw = random.Random(1)  # noqa: S311 (sample text)
        texts = [" ".join(["shard"] * draw.randint(4, 9)) for _ in range(96)]
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        ranks = ForkServer(folder)
        try:
            ranks.run("make_model", [None], arguments={"folder": str(folder / "model")})
            rounds = [
                {
                    stage: {balance: measure(ranks, folder, stage, balance, options) for balance in ("Equal", "Measured")}
                    for stage in options.stages
                }
                for _ in range(options.rounds)
            ]
        finally:
            ranks.close()
    table = [row(stage, [one[stage] for one in rounds]) for stage in options.stages]
    if options.json:
        print(json.dumps({"speeds": options.speeds, "stages": table}, indent=1))
        return
    for line in table:
        print(
            f"{line['stage']}: {line['equal']:.0f} tokens/s equal, {line['measured']:.0f} measured, {line['gain']:.2f} times; shares"
            f" {line['shares']}"
        )


def row(stage: str, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds; the gain is that of each round, since a machine's load changes between them."""
    equal, measured = ([one[balance] for one in rounds] for balance in ("Equal", "Measured"))
    return {
        "stage": stage,
        "equal": round(statistics.median(one["tokensPerSecond"] for one in equal), 1),
        "measured": round(statistics.median(one["tokensPerSecond"] for one in measured), 1),
        "gain": round(
            statistics.median(new["tokensPerSecond"] / old["tokensPerSecond"] for old, new in zip(equal, measured, strict=True)), 3
        ),
        "firstRankWaits": [round(statistics.median(one["waitShare"] for one in side), 3) for side in (equal, measured)],
        "shares": [one["shares"] for one in measured],
    }


if __name__ == "__main__":
    main()
