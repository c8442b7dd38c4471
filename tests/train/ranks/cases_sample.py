"""The script that people start from, as ranks run it."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[3] / "workspace" / "train_multi_node.py"


def sample_script(checkpoint: str, epochs: int, stop_at: int | None = None, fresh: bool = False) -> int:
    """Its `main`. `stop_at`: rank 0 gets a SIGTERM when it tells this step, as the agent of one node would send it."""
    names: dict[str, Any] = runpy.run_path(str(SCRIPT))
    main = names["main"]

    class Stopping(names["Report"]):  # type: ignore[misc]
        def step(self, step: int, steps: int, loss: float) -> None:
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

    main.__globals__["Report"] = Stopping
    sys.argv = [
        "train_multi_node.py",
        "--samples",
        "128",
        "--epochs",
        str(epochs),
        "--checkpoint",
        checkpoint,
        *(["--fresh"] if fresh else []),
    ]
    return int(main())
