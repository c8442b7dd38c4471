"""Measure what only a GPU can show:

python3 tests/bench/gpu.py                                   rows on this machine's first GPU, in order of value, for 530 s
python3 tests/bench/gpu.py --seconds 230                     again: the rows that have no result yet
python3 tests/bench/gpu.py --row 8b-lora-4k                  one of them
python3 tests/bench/gpu.py --device cpu --shape tiny         the same code in seconds, without a GPU; its figures say nothing of a GPU's

Each row is a process of its own, whose result is written as ROW.json when it ends. A kept row isn't measured again with the same card,
packages and code. No row begins that its estimate wouldn't let end in the seconds left, and one that runs longer is ended then. Needed are
torch, transformers, peft, safetensors and DeepSpeed; `make gpu-carry` makes a folder of what a machine without network lacks. Weights and
samples are random, made there.

tokens_per_second, mfu, tflops   of Lockstep's trainer, plain and as it is by default, beside transformers with PEFT, and that with Liger's
kernels planned_bytes, peak_bytes        the memory plan, and all that the device gave the process at the highest idle_share, top
of a profile: the part of the time in which the GPU ran nothing, and the kernels that took most stall_seconds, tokens_lost_share of a save:
how long training waited, and what it lost until all was durable
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "workspace"), str(ROOT / "tests" / "gpu")]
from carried import append_carried  # noqa: E402
from gpu_rows import ROWS  # noqa: E402

Result = dict[str, Any]
PLAN_TOLERANCE = 0.1


def measure_rows(
    names: Sequence[str], folder: Path, seconds: float, run: Callable[[str, float], Result], options: argparse.Namespace
) -> tuple[list[Result], dict[str, str]]:
    """Return the rows' results, of earlier calls, too, and why others have none. `run(row, limit)` measures one."""
    results, missing = [], {}
    here = {"shape": options.shape, "machine": machine(options.device)}
    deadline = time.monotonic() + seconds
    for name in names:
        kept = read_result(folder / f"{name}.json", here)
        left, needed = deadline - time.monotonic(), 0 if options.shape == "tiny" else ROWS[name].seconds
        if kept is None and left < max(needed, 1):
            missing[name] = f"takes about {needed} s, and {max(0.0, left):.0f} s were left"
            continue
        try:
            result = kept or run(name, left)
        except subprocess.TimeoutExpired:
            missing[name] = f"was ended after {left:.0f} s, when all seconds were spent; its log is beside the results"
            continue
        if kept is None:
            write_result(folder / f"{name}.json", {**here, **result})
        results.append(result)
        words = "\n".join([f"{name}: kept from an earlier call"] * (kept is not None) + lines_of(result))
        print(words, file=sys.stderr if options.json else sys.stdout, flush=True)
    return results, missing


def read_result(path: Path, here: dict[str, Any]) -> Result | None:
    """Return a row's result; None where there is none, it has an error, or it was not measured `here`."""
    try:
        result: Result = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return result if all(result.get(key) == value for key, value in here.items()) and "error" not in result else None


def write_result(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1))
    partial.replace(path)


def run_row(name: str, limit: float, folder: Path, options: argparse.Namespace) -> Result:
    """Run a row in a process of its own, so that its memory and its end are its own. Raises TimeoutExpired at the limit."""
    folder.mkdir(parents=True, exist_ok=True)
    output, log = folder / f"{name}.output", folder / f"{name}.log"
    command = [sys.executable, str(Path(__file__)), "--as-row", name, "--device", options.device, "--shape", options.shape]
    command += ["--output", str(output)]
    variables = {**os.environ, "DS_ACCELERATOR": options.device, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    variables.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if options.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    output.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("w") as writing:
        # a session of its own: processes that compile kernels end with it
        process = subprocess.Popen(command, env=variables, stdout=writing, stderr=writing, start_new_session=True)
        try:
            code = process.wait(limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0 and output.exists():
        result = json.loads(output.read_text())
        output.unlink()
    else:
        result = {"name": name, "error": f"exit code {code}", "log": log.read_text()[-3000:]}
    return {**result, "wall_seconds": round(time.monotonic() - started, 1)}


def measure_row(name: str, options: argparse.Namespace) -> None:
    """Measure a row, in its own process."""
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
        result = measure(name, ranks, Path(folder), options.shape == "tiny")
    Path(options.output).write_text(json.dumps(result))
    leave_process(0)


def machine(device: str) -> dict[str, Any]:
    """Return what a result depends on besides its row: the card, the packages and the code. It touches no GPU, whose memory is measured."""
    card = platform.processor() or platform.machine()
    if device == "cuda":
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        with contextlib.suppress(FileNotFoundError):
            card = subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    code = hashlib.sha256(b"".join(path.read_bytes() for folder in (HERE, ROOT / "workspace") for path in sorted(folder.rglob("*.py"))))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}
    return {"device": card, **versions, "cpus": os.cpu_count(), "code": code.hexdigest()[:12]}


def lines_of(result: Result) -> list[str]:
    name = result["name"]
    if "log" in result:
        return [f"{name}: {result['error']}", result["log"]]
    if "ways" in result:
        ways = [
            f"  {way}: stall {row['stall_seconds']:.4f} s, durable after {row['commit_seconds']:.2f} s"
            for way, row in result["ways"].items()
        ]
        failed = [f"  {way}: failed: {error}" for way, error in result["failed"].items()]
        return [f"{name}: {result['state_bytes'] / 1e6:.0f} MB, tokens lost {result['tokens_lost_share']:.2%}", *ways, *failed]
    head = (
        f"{name}: {result['parameters'] / 1e9:.2f}B parameters, {result['samples']} samples of {result['sequence']} tokens"
        f" ({result['lengths']})"
    )
    head += f"; losses equal: {result['losses_equal']} ({result['equality']})" if "equality" in result else ""
    plan = f"  plan {result['planned_bytes'] / 1e9:.1f} GB, peak {result['peak_bytes'] / 1e9:.1f} GB"
    if result["plan_over_peak"] is not None:
        plan += f": {result['plan_over_peak']}, {'within' if abs(result['plan_over_peak'] - 1) <= PLAN_TOLERANCE else 'NOT within'} 10 %"
    lines = [head, *([f"  ERROR: {result['error']}"] if "error" in result else []), plan]
    for trainer, row in result["profiles"].items():
        lines.append(f"  {trainer}: {row['step_seconds']} s a step, nothing runs in {row['idle_share']:.1%} of the time")
        lines += [f"    {top['share']:6.1%} {top['calls']:6} × {top['kernel']}" for top in row["top"]]
    lines += [
        f"  {trainer}: {row['tokens_per_second']} tokens/s, {row['tflops']} TFLOP/s, MFU {row['mfu']}, peak"
        f" {row['peak_allocated_bytes'] / 1e9:.1f} GB allocated, {row['peak_reserved_bytes'] / 1e9:.1f} GB reserved;"
        f" {'; '.join(row['notes']) or 'as its Trainer drives it'}"
        for trainer, row in result["trainers"].items()
    ]
    lines += [f"  {trainer}: takes no part: {reason}" for trainer, reason in result["absent"].items()]
    ratios = {"the best other": "ratio_to_best_other", "Lockstep's other way": "ratio_to_other_lockstep"}
    return lines + [f"  lockstep over {other}: {result[key]}" for other, key in ratios.items() if key in result]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--row", action="append", choices=ROWS, help="default: all, in this order")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=["large", "tiny"], default="large")
    parser.add_argument(
        "--results", type=Path, default=ROOT / ".gpu-bench", help="folder of the results; rows that have one are not measured again"
    )
    parser.add_argument("--seconds", type=float, default=530, help="time for all rows")
    parser.add_argument("--json", action="store_true", help='print {"results": [...], "missing": {row: reason}}')
    parser.add_argument("--as-row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    append_carried()
    if options.as_row:
        measure_row(options.as_row, options)
        return 0
    folder = options.results

    def run(name: str, limit: float) -> Result:
        return run_row(name, limit, folder, options)

    results, missing = measure_rows(options.row or list(ROWS), folder, options.seconds, run, options)
    for name, reason in missing.items():
        print(f"{name}: NOT REACHED: {reason}", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps({"results": results, "missing": missing}, indent=1))
    return 0 if all("error" not in result and result.get("losses_equal", True) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
