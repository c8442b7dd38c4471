"""Measure what only a GPU can show:

python3 tests/bench/gpu.py --json                            all parts on this machine's first GPU, each under 9 minutes
python3 tests/bench/gpu.py --part 8b-lora-4k                 one of them
python3 tests/bench/gpu.py --device cpu --shape tiny         the same code in seconds, without a GPU; its figures say nothing of a GPU's

Each part is a process of its own. Needed are torch, transformers, peft, safetensors and DeepSpeed; `make gpu-carry` makes a folder of what a machine
without network lacks. Weights and samples are random, made on the card. `losses_equal`: all trainers computed the same function.

tokens_per_second, mfu, tflops   of Lockstep's trainer beside transformers with PEFT, and that with DeepSpeed, in turns in one process
planned_bytes, peak_bytes        the memory plan, and all that the device gave the process at the highest
stall_seconds, tokens_lost_share of a save: how long training waited, and what it lost until all was durable
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "workspace"), str(ROOT / "tests" / "gpu")]
from carried import append_carried  # noqa: E402

PARTS = ("8b-lora-4k", "glm-air-4-layers-16k", "qwen3-30b-a3b", "8b-longest", "checkpoint")
PART_SECONDS = 530


def run_part(part: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a part in a process of its own, so that its memory and its end are its own."""
    output, log = folder / f"{part}.json", folder / f"{part}.log"
    command = [
        sys.executable,
        str(Path(__file__)),
        "--as-part",
        part,
        "--device",
        options.device,
        "--shape",
        options.shape,
        "--output",
        str(output),
    ]
    command += ["--rounds", str(options.rounds), "--block", str(options.block)]
    variables = {**os.environ, "DS_ACCELERATOR": options.device, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    variables.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if options.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    started = time.monotonic()
    with log.open("w") as writing:
        try:
            code = subprocess.run(command, env=variables, stdout=writing, stderr=writing, timeout=PART_SECONDS, check=False).returncode
            error = None if code == 0 and output.exists() else f"exit code {code}"
        except subprocess.TimeoutExpired:
            error = f"took longer than {PART_SECONDS} s"
    result: dict[str, Any] = {"name": part, "error": error, "log": log.read_text()[-3000:]} if error else json.loads(output.read_text())
    return {**result, "wall_seconds": round(time.monotonic() - started, 1)}


def measure_part(part: str, options: argparse.Namespace) -> None:
    """Measure a part, in its own process."""
    from gpu_parts import main as measure

    from lockstep_train.base.errors import leave_process
    from lockstep_train.base.ranks import join
    from lockstep_train.base.runfile import rank_environment
    from lockstep_train.model.load import quiet_transformers
    from lockstep_train.zero.start import prepare_deepspeed

    ranks = join(rank_environment())
    if ranks.device.type != options.device:
        raise SystemExit(f"--device is {options.device}, but torch computes on {ranks.device.type} here")
    quiet_transformers()
    prepare_deepspeed()
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        result = measure(part, ranks, Path(folder), options.shape == "tiny", options.rounds, options.block)
    Path(options.output).write_text(json.dumps(result))
    leave_process(0)


def machine(device: str) -> dict[str, Any]:
    import torch
    import transformers

    card = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": card, "torch": torch.__version__, "transformers": transformers.__version__, "cpus": os.cpu_count()}


def lines_of(result: dict[str, Any]) -> list[str]:
    if "error" in result:
        return [f"{result['name']}: {result['error']}", result["log"]]
    if "ways" in result:
        ways = [
            f"  {way}: stall {row['stall_seconds']:.4f} s, durable after {row['commit_seconds']:.2f} s"
            for way, row in result["ways"].items()
        ]
        failed = [f"  {way}: failed: {error}" for way, error in result["failed"].items()]
        return [f"{result['name']}: {result['state_bytes'] / 1e6:.0f} MB, tokens lost {result['tokens_lost_share']:.2%}", *ways, *failed]
    head = f"{result['name']}: {result['parameters'] / 1e9:.2f}B parameters, {result['sequence']} tokens × {result['micro_batch']}"
    head += f", plan / peak {result['plan_over_peak']}, equal first losses: {result['losses_equal']}"
    rows = [
        f"  {name}: {row['tokens_per_second']} tokens/s, {row['tflops']} TFLOP/s, MFU {row['mfu']}, peak {row['peak_allocated_bytes'] / 1e9:.1f} GB allocated, "
        f"{row['peak_reserved_bytes'] / 1e9:.1f} GB reserved"
        for name, row in result["trainers"].items()
    ]
    return [head, *rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=["large", "tiny"], default="large")
    parser.add_argument("--rounds", type=int, default=2, help="turns of A B C C B A")
    parser.add_argument("--block", type=int, default=4, help="steps a turn")
    parser.add_argument("--json", action="store_true", help='print {"results": [...], "machine": {...}}')
    parser.add_argument("--as-part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    append_carried()
    if options.as_part:
        measure_part(options.as_part, options)
        return 0
    results = []
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        for part in options.part or PARTS:
            results.append(run_part(part, options, Path(folder)))
            print("\n".join(lines_of(results[-1])), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        with contextlib.redirect_stdout(sys.stderr):  # libraries greet on import
            document = {"results": results, "machine": machine(options.device)}
        print(json.dumps(document, indent=1))
    return 0 if all("error" not in result and result.get("losses_equal", True) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
