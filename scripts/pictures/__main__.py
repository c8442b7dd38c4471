"""Record the pictures of docs/ anew: PYTHONPATH=scripts python3 -m pictures [--check] [--anew] [--draw] [SCENE...]

play.py does it, in the environment of the site. Standard library only, because that environment may not be there yet.
"""

from __future__ import annotations

import os
import subprocess
import sys

from lockstep.environments import cache_root, packages
from setup import ROOT, exit_with, say


def main() -> int:
    command = [str(packages("docs", cache_root(), say) / "bin" / "python"), "-m", "pictures.play", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")}, check=False).returncode


if __name__ == "__main__":
    exit_with(main)
