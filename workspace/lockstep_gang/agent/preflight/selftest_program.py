"""`python3 -m lockstep_gang.agent.preflight.selftest_program [PRECISION]`: a product whose result is known, on every GPU of this process
side by side; on the CPU where GPUS_PER_NODE is 0. Torch comes from the job's image.

All factors are -1, 0 or 1, and no sum exceeds 256, the largest number up to which BF16 has every whole one: so each device that computes
right gives the same bits, in whatever order it adds. The factors repeat every PERIOD rows and columns, so that the CPU knows all of the
result after a small product.

It writes a line of JSON for what it is about to do and for each device, so that one that hangs has not hidden the others.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from lockstep_machine.gpus import SMI_SECONDS, smi_rows
from lockstep_spec.cuda import has_kernels

GPU_SHAPE, CPU_SHAPE = (4096, 2048), (256, 256)
"""(rows and columns of the result, terms of each of its numbers)"""
PERIOD = 61
"""A prime: the parts of a result that a device computes together don't repeat with it."""
MOST = 256
GPU_SECONDS, CPU_SECONDS = 0.05, 0.0
"""Time for which the product is repeated."""
AT_ONCE = 8
"""Products between two looks at the clock."""
DTYPES = {"BF16": "bfloat16", "FP16": "float16", "FP32": "float32"}
_writing = threading.Lock()


def main(arguments: Sequence[str]) -> int:
    errors: dict[str, int] = {}
    asking = threading.Thread(target=lambda: errors.update(ecc_errors()), daemon=True)
    gpus = int(os.environ["GPUS_PER_NODE"])
    if gpus:
        asking.start()
    try:
        examine(gpus, arguments[0] if arguments else "")
    except Exception as error:  # (torch's errors have no common base; whatever it is, it is the answer)
        tell(error=first_line(error))
        return 1
    if gpus:
        asking.join(SMI_SECONDS)
    tell(done=True, ecc=dict(errors))
    return 0


def examine(gpus: int, precision: str) -> None:
    """Test all devices. Raises whatever keeps this process from every one of them."""
    tell(stage="import of torch")
    torch = importlib.import_module("torch")
    devices = [torch.device("cpu")]
    if gpus:
        tell(stage="start of CUDA")
        if not torch.cuda.is_available():
            torch.cuda.init()  # says why
            raise RuntimeError("torch.cuda.is_available() is False")
        if torch.cuda.device_count() < gpus:
            raise RuntimeError(f"torch finds {torch.cuda.device_count()} of {gpus} GPUs")
        devices = [torch.device("cuda", index) for index in range(gpus)]
    tell(stage="products")
    threads = [threading.Thread(target=lambda device=device: tell(device=examined(torch, device, precision))) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def examined(torch: Any, device: Any, precision: str) -> dict[str, Any]:
    """Facts about one device, its result among them, or the error that it ended with."""
    facts: dict[str, Any] = {"index": device.index or 0, "torch": str(torch.__version__)}
    try:
        if device.type == "cuda":
            facts |= described(torch.cuda.get_device_properties(device))
            built = list(torch.cuda.get_arch_list())
            if not has_kernels((facts["major"], facts["minor"]), built):
                return {**facts, "lacking": True, "built": " ".join(built)}
        chosen = precision or fastest(facts)
        facts["precision"] = chosen
        return {**facts, **product(torch, device, getattr(torch, DTYPES[chosen]))}
    except Exception as error:
        return {**facts, "error": first_line(error)}


def described(properties: Any) -> dict[str, Any]:
    uuid = str(getattr(properties, "uuid", "") or "")
    return {
        "name": str(properties.name),
        "uuid": uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
        "major": int(properties.major),
        "minor": int(properties.minor),
    }


def fastest(facts: dict[str, Any]) -> str:
    """The precision of a script's job, which nobody states: what scripts mostly take on such a device."""
    if "major" not in facts:
        return "FP32"
    return "BF16" if facts["major"] >= 8 else "FP16"


def product(torch: Any, device: Any, dtype: Any) -> dict[str, Any]:
    """`wrong` of `elements` numbers, of the first product and of one at the end, and the operations of a second in between."""
    is_gpu = device.type == "cuda"
    size, terms = GPU_SHAPE if is_gpu else CPU_SHAPE
    left, right, exact = factors(torch, terms)
    places = torch.arange(size) % PERIOD
    expected = exact[places][:, places].to(dtype)
    first, second = left.to(dtype)[places].to(device), right.to(dtype)[:, places].to(device)
    results = [first @ second]
    wait(torch, device)
    start, count = time.perf_counter(), 0
    while not count or time.perf_counter() - start < (GPU_SECONDS if is_gpu else CPU_SECONDS):
        for _ in range(AT_ONCE if is_gpu else 1):
            last = first @ second
        wait(torch, device)
        count += AT_ONCE if is_gpu else 1
    seconds = time.perf_counter() - start
    wrong = sum(int((result.cpu() != expected).sum()) for result in [*results, last])
    return {"wrong": wrong, "elements": 2 * size * size, "flops": int(2 * size * size * terms * count / seconds)}


def factors(torch: Any, terms: int) -> tuple[Any, Any, Any]:
    """(rows [PERIOD, terms], columns [terms, PERIOD], their exact product), in double precision."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(-1, 2, (PERIOD, terms), generator=draw).double()
    columns = torch.randint(-1, 2, (terms, PERIOD), generator=draw).double()
    exact = rows @ columns
    if int(exact.abs().max()) > MOST or not bool((exact == exact.round()).all()):
        raise ArithmeticError("the CPU computes wrong: a product of whole numbers has a fraction, or is too large")
    return rows, columns, exact


def wait(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ecc_errors() -> dict[str, int]:
    """Uncorrected ECC errors of each GPU since its driver was loaded, by its UUID; {} where nvidia-smi or ECC isn't there."""
    rows, _ = smi_rows("--query-gpu=uuid,ecc.errors.uncorrected.volatile.total", SMI_SECONDS)
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def tell(**what: Any) -> None:
    with _writing:
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
