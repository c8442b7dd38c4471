"""The agent of this version as one file, for places that have no image with it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def build_agent(*, compiled: bool = False) -> bytes:
    """Build agent.pyz. `compiled`: with what this Python has compiled, which does not fit into a ConfigMap."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent.pyz"
        options = [] if compiled else ["--sources"]
        subprocess.run([sys.executable, "-m", "lockstep_gang.package", *options, str(path)], check=True)
        return path.read_bytes()
