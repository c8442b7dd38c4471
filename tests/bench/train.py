"""Tokens a second of Lockstep's trainer and of Hugging Face's Trainer with DeepSpeed and PEFT, on the same work:

.venv/bin/python tests/bench/train.py --json                                two gloo ranks on CPUs, BF16 and FP32
.venv/bin/python tests/bench/train.py --shape 20m-ragged                    samples of unlike lengths, as chats have
.venv/bin/python tests/bench/train.py --device cuda --shape 8b              an 8B LoRA at 4,096 tokens on this machine's GPUs

Both are started once and kept at a gate; then they take turns, in the order A B B A, so that neither gains from what else the machine does.
A result counts only with equal losses: the same model, data, order, batch, optimizer, schedule and first adapter. Of ragged samples there
is a third row: Hugging Face's Trainer grouping them by length, in another order and so with other losses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train_inputs import LEARNING_RATE, LORA, SEED, SHAPES, Shape, lockstep_run, make_data, make_model

from lockstep_machine.network import free_ports

HERE = Path(__file__).resolve().parent
TRAINERS = ("lockstep", "hugging-face")
GROUPED = "hugging-face-grouped"
WARM_STEPS = 1
TOLERANCE = {"FP32": 5e-6, "BF16": 1e-3}
"""Relative tolerance of a step's loss. FP32 differs by the order of sums; BF16 keeps 8 bits of each value, and here the trainers round
apart.
"""


class Group:
    """The ranks of one trainer, behind their gates."""

    def __init__(self, trainer: str, inputs: Path, ranks: int, device: str, log: Path) -> None:
        self.blocks: list[float] = []
        self.shares: list[float] = []
        self.cpu: list[float] = []
        """Processor seconds of all ranks since they began, at the end of each turn."""
        self.counts: list[tuple[float, int, int]] = []
        """Processor seconds, tokens of samples and tokens with padding, of all ranks, at each gate."""
        self._log = log
        self._gates: list[tuple[Any, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        port = str(free_ports(1)[0])
        for rank in range(ranks):
            orders, give = os.pipe()
            read, reports = os.pipe()
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": device, "TOKENIZERS_PARALLELISM": "false"}
            variables |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
            command = [sys.executable, str(HERE / "train_ranks.py"), trainer, str(inputs), str(orders), str(reports)]
            with log.open("ab") as output:
                started = subprocess.Popen(
                    command, env={**os.environ, **variables}, stdout=output, stderr=output, pass_fds=(orders, reports)
                )
            os.close(orders)
            os.close(reports)
            self._processes.append(started)
            self._gates.append((os.fdopen(give, "w", buffering=1), os.fdopen(read)))

    def arrived(self) -> list[dict[str, Any]]:
        """Messages of each rank at its next gate."""
        lines = [reports.readline() for _, reports in self._gates]
        if not all(lines):
            raise SystemExit(f"a rank has ended:\n{self._log.read_text()[-4000:]}")
        reports = [json.loads(line) for line in lines]
        if "cpu" in reports[0]:
            self.counts.append(tuple(sum(report[name] for report in reports) for name in ("cpu", "tokens", "computed")))  # type: ignore[arg-type]
        return reports

    def take(self, steps: int) -> float:
        """Let all ranks take so many steps; the seconds until the last one is at its gate again."""
        started = time.perf_counter()
        for orders, _ in self._gates:
            orders.write(f"{steps}\n")
        reports = self.arrived()
        seconds = time.perf_counter() - started
        computing = max(report["computing"] for report in reports)
        self.cpu.append(sum(report["cpu"] for report in reports))
        self.shares.append(computing / seconds)
        return seconds

    def finish(self) -> dict[str, Any]:
        """Run what is left to the end; what rank 0 found."""
        for orders, _ in self._gates:
            orders.write(f"{sys.maxsize}\n")
        return self.arrived()[0]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def group(trainer: str, inputs: Path, ranks: int, device: str, log: Path) -> Iterator[Group]:
    started = Group(trainer, inputs, ranks, device, log)
    try:
        yield started
    finally:
        started.close()


def write_inputs(folder: Path, shape: Shape, precision: str, ranks: int, steps: int, device: str) -> dict[str, Path]:
    """A file for each trainer that says what to do."""
    run = folder / f"run-{precision}.json"
    run.write_text(json.dumps(lockstep_run(folder, shape, precision, ranks, steps)))
    zero = {
        "stage": shape.zero_stage,
        "overlap_comm": True,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 2e8,
        "allgather_bucket_size": 2e8,
    }
    arguments = {
        "output_dir": str(folder / "hugging-face"),
        "max_steps": steps,
        "per_device_train_batch_size": shape.micro,
        "gradient_accumulation_steps": shape.accumulation,
        "gradient_checkpointing": shape.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "bf16": precision == "BF16",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": device == "cuda",
        "seed": SEED,
        "deepspeed": {
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        },
    }
    lora = {"r": LORA["rank"], "lora_alpha": LORA["alpha"], "target_modules": LORA["targets"]}
    common = {"model": str(folder / "model"), "data": str(folder / "data.jsonl"), "seed": SEED, "lora": lora, "device": device}
    trainers = (*TRAINERS, GROUPED) if shape.ragged else TRAINERS
    files = {trainer: folder / f"{trainer}-{precision}.json" for trainer in trainers}
    files["lockstep"].write_text(json.dumps({"run": str(run)}))
    files["hugging-face"].write_text(json.dumps({**common, "precision": precision, "arguments": arguments}))
    if shape.ragged:
        grouping = arguments | {"train_sampling_strategy": "group_by_length"}
        files[GROUPED].write_text(json.dumps({**common, "precision": precision, "arguments": grouping}))
    return files


def all_steps(rounds: int, block: int) -> int:
    """One more than is measured: a turn ends where the next step would begin."""
    return WARM_STEPS + 2 * rounds * block + 1


def compare(folder: Path, shape: Shape, precision: str, ranks: int, device: str, rounds: int, block: int) -> dict[str, Any]:
    """Both trainers, in turns."""
    steps = all_steps(rounds, block)
    files = write_inputs(folder, shape, precision, ranks, steps, device)
    with contextlib.ExitStack() as stack:
        groups = {
            trainer: stack.enter_context(group(trainer, files[trainer], ranks, device, folder / f"{trainer}-{precision}.log"))
            for trainer in files
        }
        for started in groups.values():
            started.arrived()
        for started in groups.values():
            started.take(WARM_STEPS)
            started.shares.clear()
        in_turn = list(groups.values())
        for turn in [*in_turn, *reversed(in_turn)] * rounds:
            turn.blocks.append(turn.take(block))
        found = {trainer: started.finish() for trainer, started in groups.items()}
    return judge(shape, precision, ranks, device, block, groups, found)


def ragged_rows(groups: dict[str, Group]) -> dict[str, dict[str, float]]:
    """Each trainer over all its steps, the first one too, since a sampler that groups by length begins with the longest."""
    rows = {}
    for trainer, each in groups.items():
        seconds, tokens, computed = (last - first for first, last in zip(each.counts[0], each.counts[-1], strict=True))
        rows[trainer] = {
            "processor_seconds_per_1000_tokens": round(1000 * seconds / tokens, 4),
            "tokens": tokens,
            "computed": computed,
            "filled": round(tokens / computed, 4),
        }
    return rows


def judge(
    shape: Shape, precision: str, ranks: int, device: str, block: int, groups: dict[str, Group], found: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    ragged = ragged_rows(groups) if shape.ragged else {}
    tokens = shape.sequence * shape.micro * shape.accumulation * ranks * block
    if ragged:  # on the average of a turn; both have the same
        tokens = round(ragged["lockstep"]["tokens"] / (WARM_STEPS / block + len(groups["lockstep"].blocks)))
    losses = [found[trainer]["losses"] for trainer in TRAINERS]
    pairs = list(zip(*losses, strict=True))
    rates = {trainer: tokens / statistics.median(groups[trainer].blocks) for trainer in TRAINERS}
    cpu = {trainer: groups[trainer].cpu[-1] - groups[trainer].cpu[0] for trainer in TRAINERS}
    shares = {trainer: round(statistics.median(groups[trainer].shares), 4) for trainer in TRAINERS}
    difference = max(abs(mine - other) / other for mine, other in pairs)
    return {
        "name": f"{precision} on {ranks} {device} ranks",
        "lockstep_tokens_per_second": round(rates["lockstep"], 1),
        "hugging_face_tokens_per_second": round(rates["hugging-face"], 1),
        "ratio": round(rates["lockstep"] / rates["hugging-face"], 4),
        "processor_time_ratio": round(cpu["hugging-face"] / cpu["lockstep"], 4),
        "ragged": {
            **ragged,
            **{f"{other}_over_lockstep": _times(ragged, other) for other in ragged if other != "lockstep"},
        },
        "block_seconds": {trainer: [round(seconds, 3) for seconds in groups[trainer].blocks] for trainer in TRAINERS},
        "compute_share": shares if device == "cpu" else None,  # a host's clock sees a GPU's work only when it waits
        "losses_first_last": [losses[0][0], losses[0][-1]],
        "largest_loss_difference": difference,
        "loss_tolerance": TOLERANCE[precision],
        "losses_equal": difference <= TOLERANCE[precision],
        "mfu": found["lockstep"]["mfu"],
        "memory_bytes": {trainer: found[trainer]["memory"] for trainer in TRAINERS},
    }


def _times(rows: dict[str, dict[str, float]], other: str) -> float:
    """Processor time of another trainer for a token, over Lockstep's."""
    name = "processor_seconds_per_1000_tokens"
    return round(rows[other][name] / rows["lockstep"][name], 3)


def measure(name: str, precision: str, ranks: int, device: str, rounds: int, block: int) -> dict[str, Any]:
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as temporary:
        folder = Path(temporary)
        parameters = make_model(folder / "model", shape, device)
        make_data(folder / "data.jsonl", shape, all_steps(rounds, block) * shape.micro * shape.accumulation * ranks)
        return {"shape": name, "parameters": parameters, "sequence": shape.sequence} | compare(
            folder, shape, precision, ranks, device, rounds, block
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), help="default: 75m in FP32 and 1m in BF16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, help="default: 2, or as many as there are GPUs")
    parser.add_argument("--rounds", type=int, default=2, help="turns of A B B A")
    parser.add_argument("--block", type=int, default=2, help="steps a turn")
    parser.add_argument("--precision", choices=["BF16", "FP32"], help="of --shape; default: all it has")
    parser.add_argument("--json", action="store_true", help='print {"results": [...]}')
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the ranks and removes the folder, too
    ranks = options.ranks or 2
    if options.device == "cuda":
        import torch

        ranks = options.ranks or torch.cuda.device_count()
    wanted = [(options.shape, each) for each in SHAPES[options.shape].precisions] if options.shape else [("75m", "FP32"), ("1m", "BF16")]
    results = []
    for name, precision in wanted:
        if options.precision in {None, precision}:
            with contextlib.redirect_stdout(sys.stderr):  # libraries greet on import, and standard output is for results
                results.append(measure(name, precision, ranks, options.device, options.rounds, options.block))
            if not options.json:
                print("\n".join(f"{key}: {value}" for key, value in results[-1].items()) + "\n", flush=True)
    if options.json:
        print(json.dumps({"results": results}, indent=2))
    return 0 if all(result["losses_equal"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
