"""`python3 -m lockstep_gang.agent.preflight.allreduce_rank`: one process of the short all-reduce. The only one of the gang that uses torch.

It says what it is about to do in lines of JSON, so that one that hangs or dies has said where.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

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
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    cuda = int(os.environ["GPUS_PER_NODE"]) > 0
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    say(stage="rendezvous")
    timeout = timedelta(seconds=int(os.environ["LOCKSTEP_SECONDS"]))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store(dist, rank, world_size, timeout), rank=rank, world_size=world_size, timeout=timeout
    )
    say(stage="all-reduce")
    size = GPU_BYTES if cuda else CPU_BYTES
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


def all_reduce_seconds(torch: Any, dist: Any, tensor: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
