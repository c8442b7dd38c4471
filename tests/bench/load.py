"""Loading a model under Stage3: slices against transformers' own loader, and the memory plan against what a run really needs:

.venv/bin/python tests/bench/load.py --megabytes 200 --ranks 2 --json

`peak_bytes` is the growth of a process's resident memory while it loads, at its highest, by the kernel's own high-water mark;
for transformers' loader of the rank that reads. A loader maps files or reads them: mapped pages count, as they do in a pod.
`plan_ratio` is the peak of a whole short run divided by what its memory plan said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from startup import environment, make_inputs

from lockstep_machine.network import free_ports

HIDDEN, LAYER_ELEMENTS = 512, 4 * 512 * 512 + 3 * 512 * 1536


def make_model(folder: Path, megabytes: int) -> None:
    """A Llama of so many megabytes in BF16, beside the tokenizer of the tiny model that is there, in files of a quarter of that."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, which transformers imports, prints that it found no other
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round(megabytes * 1e6 / 2 / LAYER_ELEMENTS))
    config = LlamaConfig(
        vocab_size=258, hidden_size=HIDDEN, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8
    )
    (folder / "model.safetensors").unlink(missing_ok=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size=f"{max(1, megabytes // 4)}MB")


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def load_once(way: str, folder: str) -> None:
    """Load in a rank, and print what it took."""
    import torch
    import torch.distributed as dist
    from transformers.integrations import HfDeepSpeedConfig

    from lockstep_spec.choices import Precision
    from lockstep_train.base import ranks as engine_ranks
    from lockstep_train.base.runfile import rank_environment
    from lockstep_train.model.load import SliceLoad, from_pretrained, reading_slices
    from lockstep_train.zero.start import prepare_deepspeed

    ranks = engine_ranks.join(rank_environment())
    prepare_deepspeed()
    import transformers.models.llama.modeling_llama  # noqa: F401  (what it needs itself is no part of a load)

    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    stage3 = HfDeepSpeedConfig(settings)
    dist.barrier()
    before, started = status_bytes("VmRSS"), time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    load = SliceLoad()
    if way == "slices":
        with reading_slices(load):
            model = from_pretrained(Path(folder), Precision.BF16)
        assert load.fallback is None, load.fallback
    else:
        model = from_pretrained(Path(folder), Precision.BF16)
    dist.barrier()
    seconds, peak = time.monotonic() - started, status_bytes("VmHWM") - before
    kept = sum(parameter.ds_tensor.numel() * 2 for parameter in model.parameters())  # type: ignore[union-attr,operator]
    values = torch.tensor([peak, load.bytes_read, kept], dtype=torch.int64)
    highest = values.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(values)
    del stage3
    if ranks.first:
        each = {"seconds": round(seconds, 2), "peak_bytes": int(highest[0]), "read_bytes": int(values[1]), "model_bytes": int(values[2])}
        print(json.dumps({"name": way, **each}), flush=True)
    engine_ranks.leave()
    os._exit(0)


def run_ranks(ranks: int, arguments: list[str], **variables: str) -> tuple[str, list[int]]:
    """Output of rank 0, and the peak resident memory of each rank."""
    port = free_ports(1)[0]
    processes = []
    for rank in range(ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        told = environment(MASTER_ADDR="127.0.0.1", **{name: str(value) for name, value in names.items()}, **variables)
        processes.append(subprocess.Popen([sys.executable, *arguments], env=told, stdout=subprocess.PIPE, text=True))
    printed, peaks = "", []
    for rank, process in enumerate(processes):
        output = process.stdout.read()
        printed = output if rank == 0 else printed
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"rank {rank} ended with {process.returncode}: {output}")
        peaks.append(usage.ru_maxrss * 1024)
    return printed, peaks


def measure(megabytes: int, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = make_inputs(folder, "Stage3")
        make_model(folder / "model", megabytes)
        results = []
        for way in ("slices", "transformers"):
            printed, _ = run_ranks(ranks, [str(Path(__file__).resolve()), "--load", way, str(folder / "model")])
            results.append(json.loads(printed.splitlines()[-1]))
        plans = []
        for stage in ("Stage2", "Stage3"):
            document = json.loads(run.read_text())
            document["training"] |= {"zeroStage": stage, "precision": "BF16"}
            run.write_text(json.dumps(document))
            _, peaks = run_ranks(ranks, ["-m", "lockstep_train"], LOCKSTEP_RUN=str(run))
            events = [json.loads(line) for line in (folder / "run" / "logs" / "events.jsonl").read_text().splitlines()]
            planned = [event for event in events if event["kind"] == "memoryPlan"][-1]["totalBytes"]
            plans.append({"stage": stage, "planned_bytes": planned, "peak_bytes": max(peaks), "plan_ratio": round(max(peaks) / planned, 2)})
    return {"ranks": ranks, "results": results, "plans": plans}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the loading of a model under Stage3.")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--load", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load_once(*options.load)
    report = measure(options.megabytes, options.ranks)
    if options.json:
        print(json.dumps(report))
        return
    for result in report["results"]:
        print(
            f"{result['name']:>14}  {result['seconds']:6.2f} s  peak {result['peak_bytes'] / 1e6:7.1f} MB of"
            f" {result['model_bytes'] / 1e6:.1f} MB"
        )
    for plan in report["plans"]:
        print(
            f"{plan['stage']:>14}  planned {plan['planned_bytes'] / 1e6:.0f} MB, needed {plan['peak_bytes'] / 1e6:.0f} MB:"
            f" {plan['plan_ratio']}"
        )


if __name__ == "__main__":
    main()
