"""Newest adapter of a run.

Its argument is the run's folder; it prints {"adapter": folder or null, "commit": folder or null}: the final adapter, and the
newest commit where that is newer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONFIG, WEIGHTS, MANIFEST = "adapter_config.json", "adapter_model.safetensors", "manifest.json"


def newest(run: Path) -> dict[str, str | None]:
    """Return the final adapter/ and the newest checkpoints/step-N.aM, if it is newer."""
    adapter = run / "adapter"
    commits: dict[float, Path] = {}
    for folder in run.glob("checkpoints/step-*"):
        if (folder / MANIFEST).is_file():
            commits[(folder / MANIFEST).stat().st_mtime] = folder
    is_whole = (adapter / CONFIG).is_file() and (adapter / WEIGHTS).is_file()
    last = (adapter / WEIGHTS).stat().st_mtime if is_whole else 0.0
    later = max((time for time in commits if time > last), default=None)
    return {"adapter": str(adapter) if is_whole else None, "commit": str(commits[later]) if later is not None else None}


if __name__ == "__main__":
    print(json.dumps(newest(Path(sys.argv[1]))))
