"""Whether Lockstep trains on this machine's GPU as it does on CPUs: `python3 tests/gpu/run.py` (or `make test-gpu`), in under 9 minutes.

Needed are torch, transformers, peft, safetensors and DeepSpeed; `make gpu-carry` makes a folder of what a machine without network lacks.
With --device cpu the same checks run without a GPU. Exit code 1: one of them failed; `not here` and `refused` are no failures, and say why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests/gpu", "tests/bench", "tests", "workspace")]
from carried import append_carried  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--check", action="append", help="the name of one; default: all")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and the lines on standard error")
    options = parser.parse_args()
    append_carried()
    out = sys.stderr if options.json else sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries greet on import
        import torch

        if options.device == "cuda" and not torch.cuda.is_available():
            print("there is no GPU that torch can use here; --device cpu runs the same checks without one")
            return 2
        results = list(run_checks(options.device, options.check, out))
    if options.json:
        print(json.dumps({"device": options.device, "torch": torch.__version__, "results": results}, indent=1))
    return 1 if any(result["outcome"] == "FAILED" for result in results) else 0


def run_checks(device: str, names: list[str] | None, out: TextIO) -> Iterator[dict[str, Any]]:
    """Each check's outcome, with a line about it as soon as it is known."""
    from checks import CHECKS
    from scene import NotHere, Scene

    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        scene = Scene(Path(folder), device)
        for check in CHECKS:
            if names and check.__name__ not in names:
                continue
            started, outcome, message = time.monotonic(), "holds", ""
            try:
                message = check(scene) or ""
            except NotHere as reason:
                outcome, message = reason.outcome, str(reason)
            except Exception:
                outcome, message = "FAILED", traceback.format_exc()
            seconds = round(time.monotonic() - started, 1)
            line = f"{outcome:9}{seconds:7.1f} s  {check.__name__.replace('_', ' ')}"
            print("\n".join([line, *message.splitlines()]), file=out, flush=True)
            yield {"check": check.__name__, "outcome": outcome, "message": message, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
