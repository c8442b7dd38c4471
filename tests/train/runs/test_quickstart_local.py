"""`lockstep quickstart` where there is no cluster: the same job as processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from support.checkout import ROOT


def test_quickstart_without_a_cluster_trains_and_shows_what_was_learned() -> None:
    command = [sys.executable, "-m", "lockstep.cli.main", "quickstart", "--local"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (float(re.search(rf"eval loss {word}\s+([0-9.]+)", done.stdout)[1]) for word in ("before", "after"))  # type: ignore[index]
    assert after < before - 0.3
    adapter = re.search(r"^  adapter +(\S+) \(in workspace", done.stdout, re.MULTILINE)
    folder = Path(adapter[1])
    assert (folder / "adapter_model.safetensors").is_file() and (folder / "adapter_config.json").is_file()
    end = json.loads((folder.parent / "gang/end.json").read_text())
    assert (end["state"], end["result"]["adapter"]) == ("Complete", str(folder))
    assert re.search(r"^What do people get from Mibo\? +\w+ \(wrong\) +Honey \(right\)$", done.stdout, re.MULTILINE), done.stdout
    base, tuned = map(int, re.search(r"^Right of 30: base (\d+), tuned (\d+)$", done.stdout, re.MULTILINE).groups())  # type: ignore[union-attr]
    assert base <= 2 and tuned >= 25
    assert "the same on a real Kubernetes" in done.stdout
    assert "Failed to load" not in done.stdout + done.stderr
