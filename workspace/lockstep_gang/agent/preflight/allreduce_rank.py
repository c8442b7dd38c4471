"""The only processes of the gang that use torch, which comes from the job's image: ranks of an all-reduce. NCCL on GPUs, gloo on the CPU.

`python3 -m lockstep_gang.agent.preflight.allreduce_rank`: one process of the short all-reduce. It says what it is about to do in lines of
JSON, so that one that hangs or dies has said where.

`agent.pyz sweep`: one rank of an all-reduce sweep, in torchrun's environment. Like nccl-tests' all_reduce_perf, without MPI. Rank 0 prints
a line of JSON a size, after SWEEP_POINT, and SWEEP_DONE at the end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from lockstep_gang.contract.preflight import SWEEP_DONE, SWEEP_POINT
from lockstep_gang.coordinator.network import listening_socket

GPU_BYTES = 256 * 1024 * 1024
CPU_BYTES = 8 * 1024 * 1024
WARM_UP_BYTES = 1024 * 1024
TIMES = 5
ENOUGH_SECONDS = 2.0


def main() -> int:
    try:
        measure()
    except Exception as error:  # (torch's errors have no common base; whatever it is, it is the answer)
        first = (str(error).strip().splitlines() or [""])[0]
        say(error=f"{type(error).__name__}: {first}")
        return 1
    return 0


def measure() -> None:
    say(stage="import of torch")
    torch, dist, device = torch_on_device()
    say(stage="rendezvous")
    timeout = timedelta(seconds=int(os.environ["LOCKSTEP_SECONDS"]))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = store(dist, rank, world_size, timeout)
    dist.init_process_group(backend(), store=meeting, rank=rank, world_size=world_size, timeout=timeout)
    say(stage="all-reduce")
    size = GPU_BYTES if has_gpu() else CPU_BYTES
    dist.all_reduce(torch.ones(WARM_UP_BYTES // 4, device=device))
    taken = sorted(times(torch, dist, torch.ones(size // 4, device=device)))
    slowest = torch.tensor([int(taken[len(taken) // 2] * 1e6)], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # the median of the slowest rank, the same on all
    say(microseconds=max(1, int(slowest.item())), bytes=size)
    sys.stdout.flush()
    dist.destroy_process_group()


def store(dist: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Store in which the processes meet, on the pod's own address."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listening = listening_socket(address, port) if rank == 0 else None
    descriptor = None if listening is None else listening.detach()
    return dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=descriptor)


def times(torch: Any, dist: Any, tensor: Any) -> list[float]:
    """Seconds of some all-reduces of `tensor`; of one only, where that takes long. All ranks do as many: they agree on the first."""
    first = all_reduce_seconds(torch, dist, tensor)
    agreed = torch.tensor([first], device=tensor.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    more = 0 if float(agreed.item()) > ENOUGH_SECONDS / TIMES else TIMES
    return [all_reduce_seconds(torch, dist, tensor) for _ in range(more)] or [first]


def has_gpu() -> bool:
    return int(os.environ["GPUS_PER_NODE"]) > 0


def backend() -> str:
    return "nccl" if has_gpu() else "gloo"


def torch_on_device() -> tuple[Any, Any, Any]:
    """(torch, torch.distributed, this rank's device), which is the current one from now on."""
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    if not has_gpu():
        return torch, dist, torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return torch, dist, device


def all_reduce_seconds(torch: Any, dist: Any, tensor: Any) -> float:
    """Seconds of one all-reduce, from when all ranks are there."""
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # ones stay ones: nothing overflows, however often
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


SWEEP_WARM_UP = 2
SWEEP_TIMES = 7
SWEEP_ENOUGH_SECONDS = 3.0
"""A size that takes longer in all is measured fewer times."""


def sweep(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="agent.pyz sweep", description="An all-reduce sweep, as a rank of a job.")
    parser.add_argument("--least", type=int, required=True, metavar="BYTES")
    parser.add_argument("--most", type=int, required=True, metavar="BYTES")
    options = parser.parse_args(arguments)
    torch, dist, device = torch_on_device()
    dist.init_process_group(backend())
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
    first = _agreed(torch, dist, device, max(all_reduce_seconds(torch, dist, tensor) for _ in range(SWEEP_WARM_UP)))
    count = SWEEP_TIMES if first * SWEEP_TIMES < SWEEP_ENOUGH_SECONDS else 1
    taken = sorted(all_reduce_seconds(torch, dist, tensor) for _ in range(count))
    slowest = _agreed(torch, dist, device, taken[len(taken) // 2])
    return {"bytes": tensor.numel() * 4, "microseconds": max(1, round(slowest * 1e6)), "ranks": dist.get_world_size()}


def _agreed(torch: Any, dist: Any, device: Any, seconds: float) -> float:
    """The largest of all ranks' values, so that all decide alike."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def _tell(dist: Any, line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
