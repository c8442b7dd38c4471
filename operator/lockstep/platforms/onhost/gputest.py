"""One product of matrices on every GPU, by the environment's own torch: the shortest proof that driver, card and packages fit."""

from __future__ import annotations

import json
import time
from typing import Any

SIZE = 4096
TIMES = 20


def measured(torch: Any, index: int) -> dict[str, Any]:
    name = torch.cuda.get_device_name(index)
    try:
        kind = torch.bfloat16 if torch.cuda.get_device_capability(index) >= (8, 0) else torch.float16
        left = torch.ones(SIZE, SIZE, device=f"cuda:{index}", dtype=kind)
        product = left @ left
        torch.cuda.synchronize(index)
        begun = time.perf_counter()
        for _ in range(TIMES):
            product = left @ left
        torch.cuda.synchronize(index)
        seconds = (time.perf_counter() - begun) / TIMES
        if float(product[0, 0]) != SIZE:
            return {"name": name, "problem": f"a product of matrices is {float(product[0, 0])}, not {SIZE}"}
    except RuntimeError as error:
        return {"name": name, "problem": str(error).splitlines()[0][:300]}
    return {"name": name, "kind": str(kind).rpartition(".")[2], "seconds": seconds, "teraflops": 2 * SIZE**3 / seconds / 1e12}


def main() -> None:
    try:
        import torch
    except ImportError:
        print(json.dumps({"torch": None, "gpus": []}))
        return
    devices = range(torch.cuda.device_count())
    print(json.dumps({"torch": str(torch.__version__), "gpus": [measured(torch, index) for index in devices]}))


if __name__ == "__main__":
    main()
