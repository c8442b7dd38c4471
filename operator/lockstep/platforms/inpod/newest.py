"""Newest adapter of a run.

Its argument is the run's folder; it prints {"adapter": folder or null, "commit": folder or null}: the newest exported adapter, and the
newest commit where that is newer than every exported adapter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONFIG, WEIGHTS, MANIFEST = "adapter_config.json", "adapter_model.safetensors", "manifest.json"


def newest(run: Path) -> dict[str, str | None]:
    """Newest adapter and newest commit, of the final adapter/ and of checkpoints/step-N.aM with what was exported beside the shards."""
    exported: dict[float, Path] = {}
    commits: dict[float, Path] = {}
    for folder in [run / "adapter", *run.glob("checkpoints/step-*")]:
        if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
            exported[(folder / WEIGHTS).stat().st_mtime] = folder
        if (folder / MANIFEST).is_file():
            commits[(folder / MANIFEST).stat().st_mtime] = folder
    last = max(exported, default=0.0)
    later = max((time for time in commits if time > last), default=None)
    return {"adapter": str(exported[last]) if exported else None, "commit": str(commits[later]) if later is not None else None}


if __name__ == "__main__":
    print(json.dumps(newest(Path(sys.argv[1]))))
