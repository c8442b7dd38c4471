"""`agent.pyz sweep`: one rank of an all-reduce sweep, in torchrun's environment. NCCL on GPUs, gloo on the CPU. Like nccl-tests' all_reduce_perf, without MPI.

Rank 0 prints a line of JSON a size, after SWEEP_POINT, and SWEEP_DONE at the end. torch comes from the job's image.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep_gang.contract.preflight import SWEEP_DONE, SWEEP_POINT

WARM_UP = 2
TIMES = 7
ENOUGH_SECONDS = 3.0
"""A size that takes longer in all is measured fewer times."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="agent.pyz sweep", description="An all-reduce sweep, as a rank of a job.")
    parser.add_argument("--least", type=int, required=True, metavar="BYTES")
    parser.add_argument("--most", type=int, required=True, metavar="BYTES")
    options = parser.parse_args(arguments)
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    cuda = int(os.environ["GPUS_PER_NODE"]) > 0
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        for size in sizes(options.least, options.most):
            _tell(dist, SWEEP_POINT + json.dumps(measure_size(torch, dist, device, size)))
        _tell(dist, SWEEP_DONE)
    finally:
        dist.destroy_process_group()
    return 0


def sizes(least: int, most: int) -> Iterator[int]:
    """Sizes from `least` to `most`, each twice the one before."""
    size = least
    while size <= most:
        yield size
        size *= 2


def measure_size(torch: Any, dist: Any, device: Any, size: int) -> dict[str, int]:
    """The median of several all-reduces of `size` bytes of fp32, of the slowest rank."""
    tensor = torch.ones(max(1, size // 4), device=device)
    first = _agreed(torch, dist, device, max(seconds_of_one(torch, dist, tensor) for _ in range(WARM_UP)))
    times = TIMES if first * TIMES < ENOUGH_SECONDS else 1
    taken = sorted(seconds_of_one(torch, dist, tensor) for _ in range(times))
    slowest = _agreed(torch, dist, device, taken[len(taken) // 2])
    return {"bytes": tensor.numel() * 4, "microseconds": max(1, round(slowest * 1e6)), "ranks": dist.get_world_size()}


def seconds_of_one(torch: Any, dist: Any, tensor: Any) -> float:
    """Seconds of one all-reduce, from when all ranks are there."""
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # ones stay ones: nothing overflows, however often
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def _agreed(torch: Any, dist: Any, device: Any, seconds: float) -> float:
    """The largest of all ranks' values, so that all decide alike."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def _tell(dist: Any, line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
