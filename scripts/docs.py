"""Build the site of docs/ into dist/site: python3 scripts/docs.py [--serve]

A link that leads nowhere, and a page that the navigation lacks, end it with exit code 1. Standard library only: the site has packages of
its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import suppress

from lockstep.environments import cache_root, packages
from setup import ROOT, exit_with, say

CONFIG = ROOT / "scripts" / "site" / "mkdocs.yml"
INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--serve", metavar="PORT", type=int, help="show the site at 127.0.0.1:PORT, anew at every change of a page, until Ctrl-C"
    )
    options = parser.parse_args()
    program = [str(packages("docs", cache_root(), say) / "bin" / "python"), "-m", "mkdocs"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    if options.serve is not None:
        with suppress(KeyboardInterrupt):
            command = [*program, "serve", "-f", str(CONFIG), "-a", f"127.0.0.1:{options.serve}"]
            return subprocess.run(command, env=environment, check=False).returncode
        return INTERRUPTED
    ended = subprocess.run([*program, "build", "--strict", "-f", str(CONFIG)], env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        print("".join(line for line in ended.stderr.splitlines(keepends=True) if not line.startswith("INFO")), file=sys.stderr, end="")
        return 1
    print(f"docs: {ROOT / 'dist' / 'site' / 'index.html'}")
    return 0


if __name__ == "__main__":
    exit_with(main)
